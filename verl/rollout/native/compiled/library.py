"""The compiled kernels, loaded with ctypes: calls on tensors."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from verl.models.decoder.weights import DenseDecoder
from verl.models.ops.linear import Matmul
from verl.parallel.compiled import choose_kernels, open_library
from verl.parallel.device import native_bf16

REVISION = 10  # of the structures, see decoder.h
BLOCK = 16  # tokens of a block of stored keys and values
MAX_HEAD_DIM = 256
PAIRED = ("avx512_amx", "avx512_bf16")  # instruction sets with products of bfloat16 pairs
FLOATS, WIDENED, PAIRS = range(3)  # how a matmul reads its operands, see decoder.h


class Layer(Structure):
    _fields_ = (
        [(name, c_void_p) for name in ("qkv", "o", "gate_up", "down")]
        + [(name, c_void_p) for name in ("qkv_bias", "o_bias", "gate_up_bias", "down_bias")]
        + [(name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")]
        + [(name, c_float) for name in ("input_eps", "post_eps", "q_eps", "k_eps")]
        + [("window", c_int64)]
    )


class Model(Structure):
    _fields_ = (
        [(name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocab")]
        + [(name, c_int64) for name in ("hidden_block", "heads_block", "inner_block", "bf16", "kind")]
        + [(name, c_int64) for name in ("int8", "int8_head", "int8_cache")]
        + [(name, c_float) for name in ("scale", "final_eps")]
        + [(name, c_void_p) for name in ("layer", "final_norm", "head_bias", "head")]
    )


class PackedLowRank(Structure):
    _fields_ = (("down", c_void_p), ("up", c_void_p), ("rank", c_int64))


class Store(Structure):
    _fields_ = (("layer", POINTER(c_void_p)), ("slot_stride", c_int64), ("head_stride", c_int64))

    def behind(self, layers: int) -> Store:
        """The store without its first `layers`."""
        address = ctypes.addressof(self.layer.contents) + layers * ctypes.sizeof(c_void_p)
        return Store(ctypes.cast(address, POINTER(c_void_p)), self.slot_stride, self.head_stride)


class RecordedSlots(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "qkv", "attended", "middle", "gate_up", "lse")),
        ("capacity", c_int64),
        ("slots", c_void_p),
    )


class Step(Structure):
    _fields_ = (
        [(name, c_int64) for name in ("tokens", "num_tiles", "max_tile", "max_seen", "num_kept", "threads")]
        + [(name, c_int64) for name in ("num_runs", "max_rank")]
        + [(name, c_void_p) for name in ("x", "cos", "sin")]
        + [(n, c_void_p) for n in ("position", "prefix_slot", "prefix_end", "own_slot", "own_end", "order", "tiles")]
        + [(name, c_void_p) for name in ("keep", "run_ends", "kept_ends", "run_adapters")]
        + [("prefix", Store), ("own", Store)]
        + [(name, c_void_p) for name in ("record", "logits", "work")]
    )


class Kernels:
    """The kernels of one instruction set."""

    def __init__(self, library: ctypes.CDLL, handle: int, name: str):
        self._library, self._handle, self.name = library, handle, name
        self.panel: int = library.kernels_panel(handle)  # outputs are padded to a multiple of this

    def kind(self, dtype: torch.dtype) -> int:
        """The operand layout of matmuls of a model in `dtype`."""
        if dtype == torch.float32:
            return FLOATS
        return PAIRS if self.name in PAIRED and native_bf16(torch.device("cpu")) else WIDENED

    def padded(self, outputs: int) -> int:
        return -(-outputs // self.panel) * self.panel

    def pack(self, weight: torch.Tensor, out: torch.Tensor | None = None, *, int8: bool = False) -> torch.Tensor:
        """A copy of `weight` [outputs, inputs] in the layout of the matmuls: uint8, on large pages if possible. With `int8` it
        is quantized (verl/models/quantized.py)."""
        weight = weight.detach().contiguous()
        (outputs, inputs), is_bf16 = weight.shape, weight.dtype == torch.bfloat16
        num_bytes = self.packed_bytes(weight, int8=int8)
        packed = buffer(num_bytes) if out is None else out
        self._library.decoder_large_pages(packed.data_ptr(), num_bytes)
        threads = torch.get_num_threads()
        self._library.decoder_pack(
            self._handle, is_bf16, int8, packed.data_ptr(), weight.data_ptr(), outputs, inputs, threads
        )
        return packed

    def pack_halves(self, weight: torch.Tensor, *, int8: bool = False) -> torch.Tensor:
        """`pack` of both halves of `weight` (gate and up). Each half is padded to a multiple of the panel size."""
        gate, up = weight.chunk(2)
        packed = buffer(2 * self.packed_bytes(gate, int8=int8))
        self.pack(gate, packed[: len(packed) // 2], int8=int8)
        self.pack(up, packed[len(packed) // 2 :], int8=int8)
        return packed

    def packed_bytes(self, weight: torch.Tensor, *, int8: bool = False) -> int:
        return int(self._library.decoder_packed(self._handle, weight.dtype == torch.bfloat16, int8, *weight.shape))

    def product(
        self, x: torch.Tensor, packed: torch.Tensor, outputs: int, threads: int, block: int = 0
    ) -> torch.Tensor:
        """x [rows, inputs] times packed weights, without bias: float32 [rows, outputs], rounded to x's dtype. In pairs, sums
        over `block` pairs begin at zero and are added."""
        (rows, inputs), kind = x.shape, self.kind(x.dtype)
        padded = torch.zeros(-(-rows // 8) * 8, inputs + 2, dtype=x.dtype if kind == PAIRS else torch.float32)
        padded[:rows, :inputs] = x
        out = torch.empty(len(padded), self.padded(outputs))
        self._library.decoder_product(
            self._handle, kind, padded.data_ptr(), padded.stride(0) * padded.element_size(), packed.data_ptr(),
            out.data_ptr(), rows, outputs, inputs, block, threads,
        )  # fmt: skip
        return out[:rows, :outputs]

    def int8_product(self, x: torch.Tensor, packed: torch.Tensor, outputs: int, threads: int) -> torch.Tensor:
        """`product` with weights that are packed as int8."""
        (rows, inputs), kind = x.shape, self.kind(x.dtype)
        padded = torch.zeros(-(-rows // 8) * 8, inputs + 2, dtype=x.dtype if kind == PAIRS else torch.float32)
        padded[:rows, :inputs] = x
        out, levels, scales = (
            torch.empty(len(padded), self.padded(outputs)),
            torch.empty_like(padded),
            torch.empty(rows),
        )
        apart = torch.empty(rows, 2 + inputs // 32, dtype=torch.int64)
        self._library.decoder_int8_product(
            self._handle, kind == PAIRS, x.dtype == torch.bfloat16, padded.data_ptr(),
            padded.stride(0) * padded.element_size(), levels.data_ptr(), scales.data_ptr(), apart.data_ptr(), packed.data_ptr(),
            out.data_ptr(), rows, outputs, inputs, threads,
        )  # fmt: skip
        return out[:rows, :outputs]

    def sum_block(self, inputs: int) -> int | None:
        """Pairs of inputs that the trainer's bfloat16 matmul adds up before it begins a new sum, for products with `inputs`
        inputs; 0 for one sum. With it, sampler and trainer round alike. None if no value gives the trainer's bits."""
        return _sum_block(self, inputs)

    def equals_trainer(self, decoder: DenseDecoder) -> bool:
        """Whether the fused training forward of a bfloat16 `decoder` computes the kernels' bits, and those of experts."""
        plain = not decoder.departures and all(layer.sliding_window is None for layer in decoder.layers)
        plain &= not decoder.has_experts or Matmul(torch.bfloat16, torch.device("cpu")).by_kernels
        widths = {projection.weight.shape[1] for projection in decoder.projections()}
        return plain and self.kind(torch.bfloat16) == PAIRS and all(self.sum_block(n) is not None for n in widths)

    def workspace(self, model: Model, step: Step) -> int:
        """Bytes that `step.work` must have."""
        return int(self._library.decoder_workspace(self._handle, ctypes.byref(model), ctypes.byref(step)))

    def forward(self, model: Model, step: Step) -> None:
        self._library.decoder_forward(self._handle, ctypes.byref(model), ctypes.byref(step))

    def draw(
        self, logits: torch.Tensor, temperature: float, u: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample from float32 `logits` [rows, vocab] with contiguous rows. Returns tokens (int64 [rows]) and log-probs (float32
        [rows]). `u` has the uniforms, float64 [rows]; temperature 0 does not read them."""
        rows, vocab = logits.shape
        tokens, log_probs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        u = None if u is None else u.contiguous()
        self._library.decoder_draw(
            self._handle, logits.data_ptr(), rows, logits.stride(0), vocab, temperature,
            None if u is None else u.data_ptr(), tokens.data_ptr(), log_probs.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return tokens, log_probs


_SUM_BLOCKS = (0, 256, 512, 128, 64, 192, 384, 768, 1024, 2048)  # pairs


@functools.cache
def _sum_block(kernels: Kernels, inputs: int) -> int | None:
    outputs, half = 2 * kernels.panel, inputs // 2
    draw = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, inputs, generator=draw) for n in (outputs, 300))
    # every sum nearly cancels, so that its rounding errors are all that is left of it
    weight[:, half : 2 * half], x[:, half : 2 * half] = weight[:, :half], -x[:, :half]
    weight, x = weight.bfloat16(), x.bfloat16()
    packed = kernels.pack(weight)
    trainer = Matmul(torch.bfloat16, torch.device("cpu"))
    products = [trainer.product(x[:rows], weight).float() for rows in (2, 40, 300)]
    for block in _SUM_BLOCKS:
        sums = kernels.product(x, packed, outputs, 1, block)
        if all(torch.equal(sums[: len(product)], product) for product in products):
            return block
    return None


def buffer(num_bytes: int) -> torch.Tensor:
    """Bytes of uninitialised memory that start on a cache line."""
    memory = torch.empty(num_bytes + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + num_bytes]


def kernels() -> Kernels | None:
    """The kernels for this processor; None if torch computes instead. Raises ConfigError if VERL_CPU_ISA names kernels that are
    unavailable."""
    return choose_kernels(_kernels, _library() is not None)


def state() -> dict[str, str | bool | None]:
    """For `verl doctor`: the instruction set of the kernels, or None with whether they were compiled."""
    compiled = kernels()
    return {"name": None if compiled is None else compiled.name, "compiled": _library() is not None}


@functools.cache
def _kernels(name: str | None) -> Kernels | None:
    library = _library()
    handle = library.kernels_for(None if name is None else name.encode()) if library is not None else None
    return Kernels(library, handle, library.kernels_name(handle).decode()) if library is not None and handle else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled library next to this file. An installation without a compiler lacks it."""
    library = open_library(Path(__file__).with_name("_decoder"), REVISION)
    return None if library is None else declare(library)


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """`library` with the types of its functions."""
    library.kernels_for.restype, library.kernels_for.argtypes = c_void_p, [c_char_p]
    if not hasattr(library, "decoder_forward"):  # compiled for a processor without kernels
        return library
    kernels, model, step = c_void_p, POINTER(Model), POINTER(Step)
    library.kernels_name.restype, library.kernels_name.argtypes = c_char_p, [kernels]
    library.kernels_panel.restype, library.kernels_panel.argtypes = c_int, [kernels]
    library.decoder_packed.restype = c_int64
    library.decoder_packed.argtypes = [kernels, c_int, c_int, c_int64, c_int64]
    library.decoder_workspace.restype, library.decoder_workspace.argtypes = c_int64, [kernels, model, step]
    library.decoder_forward.argtypes = [kernels, model, step]
    library.decoder_large_pages.argtypes = [c_void_p, c_int64]
    library.decoder_pack.argtypes = [kernels, c_int, c_int, c_void_p, c_void_p, *[c_int64] * 3]
    library.decoder_product.argtypes = [kernels, c_int, c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 5]
    library.decoder_int8_product.argtypes = [kernels, c_int, c_int, c_void_p, c_int64, *[c_void_p] * 5, *[c_int64] * 4]
    library.decoder_draw.argtypes = [
        kernels, c_void_p, c_int64, c_int64, c_int64, c_float, c_void_p, c_void_p, c_void_p, c_int64,
    ]  # fmt: skip
    for name in ("forward", "large_pages", "pack", "product", "int8_product", "draw"):
        getattr(library, f"decoder_{name}").restype = None
    return library
