"""TMA operations of Gluon under the names of Triton 3.8, in every Triton from 3.6 on.

| Triton      | loads, stores                                            | additions          |
|-------------|----------------------------------------------------------|--------------------|
| 3.6, 3.7    | async_copy_global_to_shared, async_copy_shared_to_global | in the IR, no name |
| 3.8         | async_load, async_store, and the names before            | async_atomic_add   |
| 3.9         | async_load, async_store; the names before raise          | async_atomic_add   |
"""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):
    async_load, async_store = tma.async_load, tma.async_store
    async_atomic_add = tma.async_atomic_add
else:
    async_load, async_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

    @builtin
    def async_atomic_add(tensor_desc, coord, src, _semantic=None):
        """Add a tile of shared memory to global memory, as the operation of this name does."""
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)
