"""linnet: named operation slots for PyTorch models.

`import linnet` imports nothing else; `linnet.kernels` is the registry of slots, `linnet.models`
holds the decoders and their loader. See the README for a first use.
"""

__version__ = "0.1.0"
