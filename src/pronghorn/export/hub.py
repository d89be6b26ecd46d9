"""Push an exported folder to the Hugging Face Hub. The token goes into the requests' headers and nowhere else."""

from __future__ import annotations

from pathlib import Path

from pronghorn.errors import ConfigError, PronghornError, ServerError
from pronghorn.text import clip

EXPORTED = ("config.json", "adapter_config.json", "*.gguf", "Modelfile")
"""What a folder holds one of that can be used from the hub."""
_TEXTS = (".json", ".jsonl", ".jinja", ".md", ".txt", ".yaml", ".yml", "")
_LONGEST_TEXT = 2**27


def push_folder(
    folder: str | Path,
    repo: str,
    *,
    token: str | None = None,
    private: bool = True,
    message: str = "Export by Pronghorn",
    endpoint: str | None = None,
) -> str:
    """Push a merged folder, an adapter's or GGUF files to a repository of the hub, which is made if it isn't there.

    Args:
        repo: "owner/name", or "name" for one of the token's own user.
        token: with the right to write; None for the one that `hf auth login` saved, or HF_TOKEN.
        private: of a repository that is made; one that is there stays as it is.
        message: of the commit.
        endpoint: of the hub; None for HF_ENDPOINT, or huggingface.co.
    Returns:
        The repository's address.
    Raises:
        ConfigError: nothing to push, no token, one without the right to write, or a name that is none.
        ServerError: the hub can't be reached, or fails.
    """
    from huggingface_hub import HfApi

    source = Path(folder)
    if not source.is_dir() or not any(path for pattern in EXPORTED for path in source.glob(pattern)):
        remedy = "give a merged folder, an adapter's or one with GGUF files; of a run, one of the folders in it"
        raise ConfigError(f"{source} is not an exported folder", remedy)
    token = check_push(repo, token)
    _check_token_is_nowhere(source, token)
    api = HfApi(endpoint=endpoint, token=token)
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        ignored = [".*", "**/.*", "*.tmp"]
        api.upload_folder(repo_id=made.repo_id, folder_path=source, commit_message=message, ignore_patterns=ignored)
    except Exception as error:  # of httpx, of the hub, of the disk, and of what hashes files
        raise _plain(error, api.endpoint, repo, token) from None
    return str(made)


def check_push(repo: str, token: str | None = None) -> str:
    """Return the token to push to a repository with; what can be told before anything is written.

    Raises:
        ConfigError: no token, or a name that is none.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"{repo!r} is not a repository's name ({error})", "write owner/name") from error
    found = token or get_token()
    if not found:
        raise ConfigError(
            "there is no token for the hub",
            "log in by `hf auth login`, set HF_TOKEN, or give token=; it needs to write",
        )
    return found


def _check_token_is_nowhere(folder: Path, token: str) -> None:
    """Refuse to publish a file that holds the token."""
    for path in sorted(folder.rglob("*")):
        text = path.is_file() and path.suffix in _TEXTS and path.stat().st_size <= _LONGEST_TEXT
        if text and token.encode() in path.read_bytes():
            raise ConfigError(f"{path} holds the hub's token", "take it out, and make a new token: files are copied")


def _plain(error: Exception, endpoint: str, repo: str, token: str) -> PronghornError:
    """Return what went wrong and what to do, without the token."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, PronghornError):
        return error
    text = clip(" ".join(str(error).split()), 300).replace(token, "***")
    if isinstance(error, OfflineModeIsEnabled):
        return ServerError("the hub is switched off here (HF_HUB_OFFLINE)", "unset it, and push again")
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        said = clip(" ".join((error.server_message or "").split()), 200).replace(token, "***")
        because = f": {said}" if said else ""
        if status == 401:
            return ConfigError(f"{endpoint} doesn't know the token (401{because})", "log in anew by `hf auth login`")
        if status == 403:
            remedy = "use a token with the right to write there, or a repository of your own"
            return ConfigError(f"the token may not write to {repo} (403{because})", remedy)
        if status == 404:
            return ConfigError(f"{endpoint} has no place for {repo} (404{because})", "fix the owner's name")
        if status == 409:
            return ConfigError(f"{repo} was changed meanwhile (409{because})", "push again")
        return ServerError(f"{endpoint} fails ({status}{because})", "push again later; what was pushed is whole")
    library = type(error).__module__.partition(".")[0]
    if isinstance(error, OSError) or library in ("httpx", "httpx2"):  # huggingface_hub 1 uses the first, 2 the second
        return ServerError(f"{endpoint} can't be reached ({text})", "look at the connection and at HF_ENDPOINT")
    return ServerError(f"pushing to {repo} failed ({type(error).__name__}: {text})", "push again, or by `hf upload`")
