"""The Transformer in PyTorch; later its data, training and evaluation. Never imported by `app`."""
