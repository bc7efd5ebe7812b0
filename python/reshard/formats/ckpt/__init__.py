"""`.ckpt` files of MindSpore: weights in protobuf records."""
