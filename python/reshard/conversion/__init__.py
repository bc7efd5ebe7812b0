"""What a conversion writes: which tensors, into which files, by how many writers."""
