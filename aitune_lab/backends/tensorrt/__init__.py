"""NVIDIA TensorRT: engines compiled for the card, from an exported file."""

from .backend import TensorRTBackend, TensorRTRTXBackend
from .builder import TensorRTConfig

__all__ = ["TensorRTBackend", "TensorRTConfig", "TensorRTRTXBackend"]
