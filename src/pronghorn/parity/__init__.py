"""What numbers are compared with: transformers and PEFT, one document at a time, as it is and in a wider dtype."""
