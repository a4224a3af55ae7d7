"""How each GPU launches the kernels of Part I: tiles, warps, and options, by architecture (chapter 10b).

`sm_80` is an A100, `sm_90` an H100 or H200, `sm_100` a B200, `sm_120` an RTX 50, `gfx90a` an MI200, `gfx942` an
MI300, `gfx950` an MI350, `gfx1100` an RX 7900, `gfx1102` an RX 7600, and `gfx1201` an RX 9070.

The numbers come from the compilers' reports (`make kernels` prints them), and have not been tuned by measuring time.
A decode needs many loads under way. A prefill needs the matrix unit: on Hopper, 128 rows and 8 warps compile to
`wgmma`, with which four warps multiply together. On CDNA, up to 8 waves share 512 registers per thread: a prefill
with 64 keys spills registers to memory, one with 32 does not. RDNA 3 gives a thread at most 256 registers, so its
tiles are small. RDNA 4 needs fewer for a tile. A GeForce RTX 50 (`sm_120`) gives a program 99 KB of shared memory,
less than half of what a B200 (`sm_100`) or an H100 gives it.
"""

from __future__ import annotations

import torch

from .triton_attention import TileConfig


def amd(waves: int = 0) -> dict[str, int]:
    """Options of AMD's compiler: registers for `waves` waves per SIMD (0: the compiler
    chooses), and matrix instructions of 16 x 16."""
    return {"waves_per_eu": waves, "matrix_instr_nonkdim": 16}


TILE_CONFIGS: dict[str, tuple[TileConfig, TileConfig]] = {  # small tiles, large tiles
    "sm_80": (TileConfig(16, 2**13, 4, 3, 4), TileConfig(64, 2**13, 4, 3, 2)),
    "sm_90": (TileConfig(16, 2**13, 4, 3, 4), TileConfig(128, 2**14, 8, 3, 1)),
    "sm_100": (TileConfig(16, 2**13, 4, 3, 4), TileConfig(128, 2**13, 8, 3, 1)),
    "sm_120": (TileConfig(16, 2**13, 4, 2, 4), TileConfig(64, 2**13, 8, 3, 1)),
    "gfx90a": (TileConfig(16, 2**13, 2, 2, 4, amd(2)), TileConfig(128, 2**13, 4, 1, 2, amd(2))),
    "gfx942": (TileConfig(16, 2**13, 2, 2, 4, amd(2)), TileConfig(128, 2**13, 4, 1, 2, amd(2))),
    "gfx950": (TileConfig(16, 2**13, 2, 3, 3, amd(2)), TileConfig(128, 2**13, 4, 1, 2, amd(2))),
    "gfx1100": (TileConfig(16, 2**12, 8, 2, 3, amd(6)), TileConfig(32, 2**12, 8, 1, 3, amd(5))),
    "gfx1102": (TileConfig(16, 2**12, 8, 2, 2, amd(4)), TileConfig(32, 2**12, 8, 1, 2, amd(4))),
    "gfx1201": (TileConfig(16, 2**13, 4, 1, 7, amd()), TileConfig(128, 2**13, 8, 1, 2, amd())),
    "float32": 2 * (TileConfig(16, 0, 8, 1, 2),),  # CDNA's matrix unit takes float32
    "float32 gfx1": 2 * (TileConfig(16, 0, 16, 3, 2),),
}


RELATIVES = {
    "gfx": "gfx1100", "gfx9": "gfx942", "gfx1103": "gfx1102", "gfx115": "gfx1102",
    "gfx1151": "gfx1100", "gfx120": "gfx1201",
}  # fmt: skip


def nearest(name: str) -> str:
    """The row of `TILE_CONFIGS` for a GPU: its own, or that of the longest prefix."""
    if name in TILE_CONFIGS:
        return name
    starts = (name[:n] for n in range(len(name), 2, -1))
    return next(RELATIVES[start] for start in starts if start in RELATIVES)


def architecture(device: torch.device) -> str:
    """The key into `TILE_CONFIGS` for a device: its own or its nearest relative's."""
    if device.type == "cpu":
        return "sm_80"  # any row works in the interpreter
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:  # a GeForce's or a B200's Blackwell, Hopper, older
        firsts = {12: "sm_120", 10: "sm_100", 9: "sm_90", 0: "sm_80"}
        return next(arch for first, arch in firsts.items() if properties.major >= first)
    return nearest(properties.gcnArchName.split(":")[0])


def configs_for(
    device: torch.device,
    dtype: torch.dtype,
    table: dict[str, tuple[TileConfig, TileConfig]],
) -> tuple[TileConfig, TileConfig]:
    """The row of `table` for a device. Without a matrix unit for `dtype`: "float32", or
    on RDNA "float32 gfx1", if there is one."""
    arch = architecture(device)
    if dtype != torch.float32 or arch.startswith("gfx9"):
        return table[arch]
    is_rdna = arch.startswith("gfx1") and "float32 gfx1" in table
    return table["float32 gfx1" if is_rdna else "float32"]
