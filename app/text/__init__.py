"""Text on its way to and from the model: segments, wrapping, token ids.

``split`` a text, ``wrap`` what is too long, encode, decode, ``join``: the parts in between come back byte
for byte.
"""

from app.text.segmentation import SegmentedText, split
from app.text.tokenizer import Tokenizer, check_text
from app.text.wrapping import wrap

__all__ = ["SegmentedText", "Tokenizer", "check_text", "split", "wrap"]
