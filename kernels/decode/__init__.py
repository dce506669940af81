"""Decoding against a cache of keys and values, for rows of one length or packed queries."""

from .launch import PreparedDecode as PreparedDecode
from .launch import kernel_launch as kernel_launch
from .launch import launch_decode as launch_decode
from .launch import prepare_decode as prepare_decode
from .packed import PreparedPacked as PreparedPacked
from .packed import launch_packed as launch_packed
from .packed import prepare_packed as prepare_packed
