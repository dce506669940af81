"""Text generation with KV caches."""

from typing import NoReturn

from ..missing import raise_missing
from ..models.sampling import Sampling as Sampling
from .generate import Batch as Batch
from .generate import generate_batch as generate_batch
from .generate import generate_text as generate_text
from .generate import generate_texts as generate_texts
from .generate import generate_tokens as generate_tokens
from .generate import unpad as unpad
from .request import Request as Request
from .request import Tally as Tally
from .search import Beam as Beam
from .search import beam_search as beam_search
from .search import beam_texts as beam_texts
from .text import TextStream as TextStream
from .translate import beam_translate as beam_translate
from .translate import greedy_translate as greedy_translate
from .translate import translate as translate


def __getattr__(name: str) -> NoReturn:
    raise_missing(__name__, name)
