"""Record of a dry run: what each call launched, compiled, waited for and raised."""

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

Call = Callable[[], object]
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, warp_size=32,
    total_memory=80 << 30, L2_cache_size=50 << 20, uuid="GPU-0",
    shared_memory_per_block_optin=227 << 10, regs_per_multiprocessor=65536,
)  # fmt: skip
# What torch.cuda says of it.
ANSWERS = {
    "is_available": True, "device_count": 1, "current_device": 0, "_exchange_device": 0,
    "get_device_capability": (9, 0), "get_device_properties": H100, "_maybe_exchange_device": 0,
    "_lazy_init": None, "is_current_stream_capturing": False,
}  # fmt: skip
_CHECKOUT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Scene:
    """One call, and the same call again for other lengths and batch sizes.

    launches: kernels, by all of them. compiled: kernels by name, by the first call; recompiled: by
    those after it. syncs: where the host waited for the GPU. faults: what a GPU would not stand.
    """

    name: str
    launches: int = 0
    compiled: list[str] = dataclasses.field(default_factory=list)
    recompiled: list[str] = dataclasses.field(default_factory=list)
    syncs: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)


class Stage:
    """Runs calls, and keeps what became of them."""

    def __init__(self, count_launches: Callable[[], int]) -> None:
        self.scenes: list[Scene] = []
        self._count_launches = count_launches
        self._again = False

    @property
    def scene(self) -> Scene:
        return self.scenes[-1]

    def play(
        self, name: str, call: Call, again: Sequence[Call] = (), launches: bool = True
    ) -> None:
        """Run `call`, and those of `again`, which must find its kernels compiled."""
        self.scenes.append(Scene(name))
        for i, function in enumerate((call, *again)):
            self._again = i > 0
            before = self._count_launches()
            try:
                function()
            except Exception as error:
                self.fault(
                    f"run {i}: {type(error).__name__}: {str(error)[:300]} at {_where(error)}"
                )
                return
            launched = self._count_launches() - before
            self.scene.launches += launched
            if launches and not launched:
                self.fault(f"run {i} launched nothing")
        if self.scene.recompiled:
            self.fault(f"compiled again for another shape: {self.scene.recompiled}")

    def fault(self, what: str) -> None:
        if what not in self.scene.faults:
            self.scene.faults.append(what)

    def compiled(self, kernel: str) -> None:
        (self.scene.recompiled if self._again else self.scene.compiled).append(kernel)

    def waited(self, how: str) -> None:
        """Note that the host waits for the GPU here, unless the dry run itself does."""
        frames = reversed(traceback.extract_stack())
        where = next((frame for frame in frames if _ours(frame.filename)), None)
        if where is not None and (line := f"{how} at {_place(where)}") not in self.scene.syncs:
            self.scene.syncs.append(line)


def _ours(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_CHECKOUT) and path.relative_to(_CHECKOUT).parts[0] in (
        "fastattn",
        "kernels",
    )


def _place(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).relative_to(_CHECKOUT)}:{frame.lineno}"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [_place(frame) for frame in frames if _ours(frame.filename)]
    return " < ".join(reversed(ours[-3:])) or f"{frames[-1].filename}:{frames[-1].lineno}"
