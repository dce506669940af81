"""Ready-made masks and scores, as `mask_mod`, `attn_bias` and similar options; needs Triton."""

from .compose import and_masks as and_masks
from .compose import bind as bind
from .compose import from_python as from_python
from .compose import or_masks as or_masks
from .compose import visited_blocks as visited_blocks
from .distance import alibi_bias as alibi_bias
from .distance import forgetting_bias as forgetting_bias
from .grids import decomposed_positions as decomposed_positions
from .grids import natten_1d as natten_1d
from .grids import natten_2d as natten_2d
from .grids import natten_3d as natten_3d
from .grids import sliding_tiles_2d as sliding_tiles_2d
from .grids import swin_windows as swin_windows
from .sharing import block_diffusion as block_diffusion
from .sharing import flamingo as flamingo
from .sharing import shared_prefix as shared_prefix
from .sharing import tree as tree
from .windows import causal as causal
from .windows import dilated as dilated
from .windows import window_by_head as window_by_head
