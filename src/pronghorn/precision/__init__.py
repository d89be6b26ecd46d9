"""How weights multiply: in the dtype of the products, copied from float32, or written out from 4 bits."""
