"""What each slot means: plain PyTorch, importing nothing from `linnet.kernels`."""
