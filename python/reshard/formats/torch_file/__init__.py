"""Files of `torch.save`: `.pt`, `.pth`, `.bin`, and folders of `.bin` files with an index."""
