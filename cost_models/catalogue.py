"""The catalogue: common devices and links by name, every figure with its source.

Enters: a name in a usual spelling (``H100-SXM``, ``h100 sxm5 80gb``, ``A100-80GB``). Leaves: a ``Device`` or ``Link``.
A figure that was read in a public document carries that document; one known only from a data sheet as remembered says
"recalled". Figures measured on one machine belong into a profile, not here, with the CPU core as the one exception.

Memory is what the process can address (``total_memory`` of ``torch.cuda.get_device_properties``, recalled, rounded
down), which is less than the name says. Peaks are dense. ``float32`` is the rate without TF32, PyTorch's default.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from cost_models.errors import ClusterError
from cost_models.parts import Device, DeviceKind, Link

GIB = 2**30

_ML = "stas00/ml-engineering@744d01e1 compute/accelerator/README.md"
_NET = "stas00/ml-engineering@744d01e1 network/README.md"
_AZURE = "Azure/AI-benchmarking-guide@8fd0c6e1 Azure_Results"
_VTRAIN = "VIA-Research/vTrain@f8dda847 trace"
_F64 = "; float64 recalled"
_NO_MAMF = "; efficiency assumed as for its neighbours"


def _device(
    name: str,
    memory_gib: float,
    bandwidth_gb: float,
    tera: Mapping[str, float],
    source: str,
    matmul: float = 0.80,  # between A100 PCIe 0.811 and H100 SXM 0.803, MAMF table of _ML lines 350-361
    attention: float = 0.50,
    memory: float = 0.85,  # BabelStream Triad: A100 1.70 of 2.0 TB/s, H100 2.97 of 3.35, H200 4.15 of 4.8 (_AZURE)
    kind: DeviceKind = "cuda",
    # with the ramp in compute.py: 1024^3 on A100 takes 18 us where 8.4 us is arithmetic (_AZURE)
    launch_seconds: float = 4e-6,
    sustained: float = 1.0,
) -> Device:
    peaks = {dtype: value * 1e12 for dtype, value in tera.items()}
    memory_bytes = int(memory_gib * GIB)
    return Device(
        name,
        kind,
        memory_bytes,
        bandwidth_gb * 1e9,
        peaks,
        launch_seconds,
        source,
        matmul,
        attention,
        memory,
        sustained,
    )


def _tensor(f64: float, f32: float, tf32: float, half: float, f8: float = 0.0, int8: float = 0.0) -> dict[str, float]:
    """Peaks in TFLOP/s; zero means that the device has no such unit."""
    names = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "int8")
    return {name: value for name, value in zip(names, (f64, f32, tf32, half, half, f8, int8), strict=True) if value}


_A100 = _tensor(19.5, 19.5, 156, 312, int8=624)  # float64: tensor cores, which cuBLAS uses
_H100 = _tensor(67, 67, 494.5, 989, 1979, 1979)
# Flash Attention 2: 179.5 of 312 TFLOP/s, head dim 64, 8192 tokens (_AZURE ND_A100_v4_results.md)
_A100_ATTENTION = 0.575
_H100_ATTENTION = 0.33  # Flash Attention 2: 327.9 of 989 TFLOP/s, head dim 128 (_AZURE ND_H100_v5_results.md)
# Whole training steps against lone multiplies: fitted to the calibration half of vTrain's (A100) and of MosaicML's runs (H100),
# see docs/validation.md. The best shape alone reaches 0.869 and 0.803 of the peak (MAMF table of _ML).
_A100_SUSTAINED = 0.944
_H100_SUSTAINED = 0.772

_DEVICES = (
    _device("P100-SXM2-16GB", 15.8, 732, {"float64": 5.3, "float32": 10.6, "float16": 21.2}, "data sheet, recalled"),
    _device(
        "V100-SXM2-16GB",
        15.7,
        900,
        {"float64": 7.8, "float32": 15.7, "float16": 125},
        "float16 peak read in bigscience experiments/gpt2.md; rest data sheet, recalled. No bfloat16 unit",
    ),
    _device(
        "V100-SXM2-32GB",
        31.7,
        900,
        {"float64": 7.8, "float32": 15.7, "float16": 125},
        "as V100-SXM2-16GB, recalled",
    ),
    _device("V100-PCIe-16GB", 15.7, 900, {"float64": 7.0, "float32": 14, "float16": 112}, "data sheet, recalled"),
    _device("V100-PCIe-32GB", 31.7, 900, {"float64": 7.0, "float32": 14, "float16": 112}, "data sheet, recalled"),
    _device(
        "T4",
        14.5,
        320,
        {"float64": 0.25, "float32": 8.1, "float16": 65, "int8": 130},
        "float32, memory and bandwidth read at sysrqmts.com; tensor peaks recalled" + _F64,
    ),
    _device(
        "A10G",
        21.9,
        600,
        _tensor(0.49, 31.5, 35, 70, int8=140),
        "A10G data sheet, recalled: check before relying on it",
    ),
    _device("A40", 44.4, 696, _tensor(0.58, 37.4, 74.8, 149.7, int8=299.3), "data sheet copy at ecer.com" + _F64),
    _device(
        "A100-SXM4-40GB",
        39.3,
        1555,
        _A100,
        f"{_ML} l.253-278; 1555 GB/s read at sysrqmts.com; matmul 271.2 of 312 there l.351{_F64}",
        matmul=0.869,
        sustained=_A100_SUSTAINED,
        attention=_A100_ATTENTION,
    ),
    _device(
        "A100-SXM4-80GB",
        79.1,
        2000,
        _A100,
        f"{_ML} l.253-278, l.466-490 (2.00 TB/s; data sheet 2039 recalled); matmul 271.2 of 312 there l.351{_F64}",
        matmul=0.869,
        sustained=_A100_SUSTAINED,
        attention=_A100_ATTENTION,
    ),
    _device("A100-PCIe-40GB", 39.3, 1555, _A100, "data sheet, recalled", matmul=0.811, attention=_A100_ATTENTION),
    _device(
        "A100-PCIe-80GB",
        79.1,
        1940,
        _A100,
        f"{_ML} l.253-278, l.466-490; matmul 252.9 of 312 there l.353{_F64}",
        matmul=0.811,
        attention=_A100_ATTENTION,
    ),
    _device("L4", 22.0, 300, _tensor(0.47, 30.3, 60, 121, 242, 242), "data sheet (sparse figures halved), recalled"),
    _device("L40S", 44.4, 860, _tensor(1.4, 91.6, 183, 362, 733, 733), f"{_ML} l.253-278, l.466-490{_F64}{_NO_MAMF}"),
    _device(
        "RTX-3090",
        23.6,
        936,
        _tensor(0.56, 35.6, 35.6, 71, int8=284),
        "GA102 whitepaper (float32 accumulate), recalled",
    ),
    _device(
        "RTX-4090",
        23.6,
        1008,
        _tensor(1.3, 82.6, 82.6, 165.2, 330.3, 660.6),
        "Ada whitepaper (float32 accumulate), recalled",
    ),
    _device(
        "RTX-5090",
        31.3,
        1792,
        _tensor(1.6, 104.8, 104.8, 209.5, 419, 838),
        "Blackwell GeForce whitepaper (float32 accumulate), recalled with low certainty",
    ),
    _device(
        "H100-PCIe-80GB",
        79.1,
        2000,
        _tensor(51, 51, 378, 756, 1513, 1513),
        f"{_ML} l.253-278, l.466-490{_F64}{_NO_MAMF}",
        attention=_H100_ATTENTION,
    ),
    _device(
        "H100-SXM5-80GB",
        79.1,
        3350,
        _H100,
        f"{_ML} l.253-278, l.466-490; matmul 794.5 of 989 there l.354{_F64}",
        matmul=0.803,
        sustained=_H100_SUSTAINED,
        attention=_H100_ATTENTION,
    ),
    _device(
        "H100-SXM5-96GB-HBM2e",
        94.9,
        2400,
        _H100,
        f"as H100-SXM5-80GB, HBM2e, 500 W: pytorch/torchtitan@820504e2 benchmarks/llama3_h100_202412_torchtitan.md{_F64}",
        matmul=0.803,
        sustained=_H100_SUSTAINED,
        attention=_H100_ATTENTION,
    ),
    _device(
        "H200-SXM-141GB",
        139.8,
        4800,
        _H100,
        f"{_ML} l.253-278, l.466-490; matmul 'the same' as H100 there l.354{_F64}",
        matmul=0.803,
        sustained=_H100_SUSTAINED,
        attention=_H100_ATTENTION,
    ),
    _device(
        "B200-SXM-180GB",
        178.0,
        8000,
        {**_tensor(40, 80, 1125, 2250, 4500, 4500), "float4": 9000},
        f"{_ML} l.253-278, l.466-490; matmul 1745 of 2250 there l.356{_F64}",
        matmul=0.776,
    ),
    _device(
        "GB200-186GB",
        184.0,
        8000,
        {**_tensor(40, 80, 1250, 2500, 5000, 5000), "float4": 10000},
        f"{_ML} l.253-278, l.466-490; matmul 1822 of 2500 there l.358{_F64}",
        matmul=0.729,
    ),
    _device(
        "B300-SXM-288GB",
        268.0,
        8000,
        {**_tensor(1.2, 80, 1125, 2250, 4500), "float4": 12600},
        f"{_ML} l.253-278, l.466-490; matmul as B200{_F64}",
        matmul=0.776,
    ),
    _device(
        "GB300-288GB",
        277.0,
        8000,
        {**_tensor(1.3, 80, 1250, 2500, 5000), "float4": 15000},
        f"{_ML} l.253-278, l.466-490; matmul as GB200{_F64}",
        matmul=0.729,
    ),
    _device(
        "MI250X-GCD",
        63.9,
        1640,
        _tensor(23.9, 23.95, 0, 191.5, int8=191.5),
        f"{_ML} l.253-278, l.466-490: half of the card, as PyTorch sees two devices{_F64}{_NO_MAMF}",
        matmul=0.60,  # assumed: between MI300X 0.514 and MI325X 0.604 (_ML l.360-361) and the NVIDIA rows
        attention=0.35,  # assumed
        kind="rocm",
    ),
    _device(
        "MI300X",
        191.5,
        5300,
        _tensor(81.7, 163.4, 653.7, 1300, 2610, 2600),
        f"{_ML} l.253-278, l.466-490; matmul 668.4 of 1300 there l.361{_F64}",
        matmul=0.514,
        attention=0.30,  # assumed
        kind="rocm",
    ),
    _device(
        "MI325X",
        255.5,
        6000,
        _tensor(81.7, 163.4, 653.7, 1300, 2610, 2600),
        f"{_ML} l.253-278, l.466-490; matmul 784.9 of 1300 there l.360{_F64}",
        matmul=0.604,
        attention=0.30,  # assumed
        kind="rocm",
    ),
    _device(
        "CPU-core",
        4.0,
        10,  # a fresh 120 MB result reaches 5.9 GB/s (page faults included), a 4 MB one in cache 85 GB/s
        {"float64": 0.049, "float32": 0.104, "bfloat16": 0.22},
        "one thread of an EPYC 9004 core (AVX-512, oneDNN), PyTorch 2.13: matrix multiply of 512 to 1024, add of 1e6 "
        "to 3e7 elements, measured once; memory is a placeholder",
        matmul=1.0,
        # 79 of 104 GFLOP/s: scaled_dot_product_attention, batch 4, 8 heads of 64, 256 tokens, same core
        attention=0.76,
        memory=1.0,
        kind="cpu",
        launch_seconds=10e-6,  # Python, dispatch and autograd; the bare operator is 1.2 us on that core
    ),
)

_A100_NVLINK = 0.772  # 231.58 of 300 GB/s, 8 GPUs all-reduce 8 GB (_AZURE ND_A100_v4_results.md)
_H100_NVLINK = 0.82  # "370 GB/s effective of 450" for a ring, NVIDIA/nccl-tests issue #212
_V100_NVLINK = 0.897  # 134.51 of 150 GB/s, 8 GPUs all-reduce 1 GB (_VTRAIN/v100)
# Bus bandwidth of an all-reduce of 1 GB over the first g of 8 GPUs, as a share of the link's (_VTRAIN/a100, /v100). On the
# V100's hybrid cube mesh it is that of the rings that NCCL finds among them.
_A100_BY_SIZE = ((2, 0.658), (3, 0.706), (4, 0.740), (5, 0.748), (6, 0.757), (8, 0.772))
_V100_BY_SIZE = ((2, 0.150), (3, 0.301), (4, 0.569), (5, 0.248), (6, 0.305), (7, 0.579), (8, 0.897))
# Likewise, 512 MB over 2, 4, 8 and 16 GCDs (microsoft/nnscaler@1585c15d mi200 profile)
_MI250X_BY_SIZE = ((2, 0.651), (4, 0.181), (8, 0.386), (16, 1.0))
# NVLS all-reduce on 8x H100 reaches 478.87 GB/s bus bandwidth = 273.6 GB/s of buffer = 450 x e / (1 + 1/8) (_AZURE)
_NVLS_H100 = 0.684
_NVLS_GB200 = 0.477  # 8 GB over 72 GPUs in 20.3 ms = 900 x e / (1 + 1/72), coreweave/nccl-tests PR 43
_NVLINK_STEP = 3e-6  # slope from 2 to 8 GPUs of the all-reduce floor, about 2 to 4 us a step (_VTRAIN/a100, 50 MB)
_IB_STEP = 5e-6  # 46 us for 16 GPUs on 2 nodes, small messages, NVIDIA/nccl issue #1244, less launch and NVLink steps
_HDR_REACHED = 0.96  # 24 of 25 GB/s per card, NVIDIA/nccl-tests issue #252
_NDR_REACHED = 0.94  # "46-48 GB/s per card expected" of 50, NVIDIA/nccl-tests issue #290
_TCP_STEP = 30e-6  # half a round trip through the kernel and a host copy, recalled
_PCIE3_REACHED = 0.63  # 10.05 of 16 GB/s, 4x V100-PCIe all-reduce (Sheffield Bessemer docs)
_PCIE5_REACHED = 0.44  # 28 of 63 GB/s, 8x RTX 5090 all-reduce, NVIDIA/nccl issue #1639
_ONE_CARD_EACH = "; one card for each device"

_LINKS = (
    Link("NVLink1", 80e9, _NVLINK_STEP, f"{_NET} l.298; efficiency as NVLink2", _V100_NVLINK, direct=True),
    Link(
        "NVLink2",
        150e9,
        _NVLINK_STEP,
        f"{_NET} l.299; {_VTRAIN}/v100 (hybrid cube mesh)",
        _V100_NVLINK,
        direct=True,
        efficiency_by_size=_V100_BY_SIZE,
    ),
    Link(
        "NVLink3",
        300e9,
        _NVLINK_STEP,
        f"{_NET}; {_AZURE}/ND_A100_v4_results.md; {_VTRAIN}/a100",
        _A100_NVLINK,
        efficiency_by_size=_A100_BY_SIZE,
    ),
    Link(
        "NVLink4",
        450e9,
        _NVLINK_STEP,
        f"{_NET}; NVIDIA/nccl-tests issue #212",
        _H100_NVLINK,
        multicast=True,
        multicast_efficiency=_NVLS_H100,
    ),
    Link(
        "NVLink5",
        900e9,
        _NVLINK_STEP,
        f"{_NET}; efficiency of a ring as NVLink4, assumed; coreweave/nccl-tests PR 43",
        _H100_NVLINK,
        multicast=True,
        multicast_efficiency=_NVLS_GB200,
    ),
    Link(
        "NVLink4-bridge",
        300e9,
        _NVLINK_STEP,
        "data sheet; 115 GB/s over 2 H100-PCIe, NVIDIA/nccl-tests issue #194",
        0.385,
    ),
    Link(
        "xGMI-MI250X",
        175e9,
        5e-6,
        f"half of 350 GB/s a card, {_NET}; 67.5 GB/s in all-reduce of 8 GCDs, microsoft/nnscaler@1585c15d mi200",
        0.386,
        efficiency_by_size=_MI250X_BY_SIZE,
    ),
    Link("xGMI-MI300X", 448e9, 5e-6, f"7 x 64 GB/s, {_NET}; efficiency recalled", 0.70, direct=True),
    Link("PCIe3", 16e9, 3e-6, f"{_NET}; Sheffield Bessemer docs", _PCIE3_REACHED),
    Link("PCIe4", 31e9, 3e-6, f"{_NET}; efficiency as PCIe3, assumed", _PCIE3_REACHED),
    Link("PCIe5", 63e9, 3e-6, f"{_NET}; NVIDIA/nccl issue #1639", _PCIE5_REACHED),
    Link("InfiniBand-EDR", 12.5e9, _IB_STEP, f"{_NET}; efficiency as HDR{_ONE_CARD_EACH}", _HDR_REACHED),
    Link("InfiniBand-HDR", 25e9, _IB_STEP, f"{_NET}; NVIDIA/nccl-tests issue #252{_ONE_CARD_EACH}", _HDR_REACHED),
    Link(
        "InfiniBand-HDRx4", 25e9, _IB_STEP, f"{_NET}; NVIDIA/nccl-tests issue #119; four cards a node", _HDR_REACHED, 4
    ),
    Link("InfiniBand-NDR", 50e9, _IB_STEP, f"{_NET}; NVIDIA/nccl-tests issue #290{_ONE_CARD_EACH}", _NDR_REACHED),
    Link("InfiniBand-XDR", 100e9, _IB_STEP, f"{_NET}; efficiency as NDR, assumed{_ONE_CARD_EACH}", _NDR_REACHED),
    Link("EFA-P4d", 12.5e9, 15e-6, f"4 x 100 Gb/s a node, {_NET}; latency and efficiency recalled", 0.75, 4),
    Link("EFA-P5", 50e9, 15e-6, f"400 GB/s a node, {_NET}; latency and efficiency recalled", 0.75),
    Link(
        "GPUDirect-TCPXO-200G",
        25e9,
        400e-6,  # 16 MB takes 0.98 ms, of which 0.09 is bandwidth; below 4 MB another protocol takes a quarter of it
        "8 cards of 200 Gb/s a node, 181 GB/s of all-reduced buffer over 2 nodes of 8x H100 (GCP a3-mega nccl-tests)",
        0.904,
    ),
    Link(
        "RoCE-100G",
        12.5e9,
        _IB_STEP,
        "75 of 100 GB/s with 8 cards, NVIDIA/nccl issue #495; one card for each device",
        0.75,
    ),
    Link("Ethernet-1G", 0.125e9, 50e-6, "data sheet; TCP goodput recalled; one port a node", 0.94, 1),
    Link("Ethernet-10G", 1.25e9, _TCP_STEP, "data sheet; TCP goodput recalled; one port a node", 0.94, 1),
    Link("Ethernet-25G", 3.125e9, _TCP_STEP, "data sheet; TCP goodput recalled; one port a node", 0.90, 1),
    Link("Ethernet-100G", 12.5e9, _TCP_STEP, "data sheet; TCP efficiency recalled; one port a node", 0.75, 1),
    Link(
        "Loopback",
        2e9,
        200e-6,
        "gloo over 127.0.0.1, PyTorch 2.13, 2 processes on 2 EPYC 9004 cores: all-reduce of 64 MiB in 38 ms, floor of "
        "0.7 ms, measured once",
        0.88,
    ),
)

DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _DEVICES})
LINKS: Mapping[str, Link] = MappingProxyType({link.name: link for link in _LINKS})

_DEVICE_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "P100": "P100-SXM2-16GB",
        "V100-16GB": "V100-SXM2-16GB",
        "V100-32GB": "V100-SXM2-32GB",
        "V100-SXM-16GB": "V100-SXM2-16GB",
        "V100-SXM-32GB": "V100-SXM2-32GB",
        "A100-40GB": "A100-SXM4-40GB",
        "A100-80GB": "A100-SXM4-80GB",
        "A100-SXM-40GB": "A100-SXM4-40GB",
        "A100-SXM-80GB": "A100-SXM4-80GB",
        "H100": "H100-SXM5-80GB",
        "H100-80GB": "H100-SXM5-80GB",
        "H100-SXM": "H100-SXM5-80GB",
        "H100-SXM5": "H100-SXM5-80GB",
        "H100-SXM-80GB": "H100-SXM5-80GB",
        "H100-PCIe": "H100-PCIe-80GB",
        "H200": "H200-SXM-141GB",
        "H200-SXM": "H200-SXM-141GB",
        "B200": "B200-SXM-180GB",
        "B200-SXM": "B200-SXM-180GB",
        "GB200": "GB200-186GB",
        "B300": "B300-SXM-288GB",
        "B300-SXM": "B300-SXM-288GB",
        "GB300": "GB300-288GB",
        "MI250X": "MI250X-GCD",
        "MI250": "MI250X-GCD",
        "Tesla-T4": "T4",
        "GeForce-RTX-3090": "RTX-3090",
        "GeForce-RTX-4090": "RTX-4090",
        "CPU": "CPU-core",
    }
)
_LINK_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "xGMI": "xGMI-MI300X",
        "EDR": "InfiniBand-EDR",
        "HDR": "InfiniBand-HDR",
        "NDR": "InfiniBand-NDR",
        "XDR": "InfiniBand-XDR",
        "IB-EDR": "InfiniBand-EDR",
        "IB-HDR": "InfiniBand-HDR",
        "IB-NDR": "InfiniBand-NDR",
        "IB-XDR": "InfiniBand-XDR",
        "PCIe-3.0": "PCIe3",
        "PCIe-4.0": "PCIe4",
        "PCIe-5.0": "PCIe5",
        "1GbE": "Ethernet-1G",
        "10GbE": "Ethernet-10G",
        "25GbE": "Ethernet-25G",
        "100GbE": "Ethernet-100G",
        "gloo": "Loopback",
        "lo": "Loopback",
    }
)


def find_device(name: str) -> Device:
    """The catalogue's device of this name or alias; capitals, spaces, dashes and a leading "NVIDIA" do not matter.

    Raises:
        ClusterError: no such device; the message has the near matches and all names.
    """
    return DEVICES[_find("device", name, DEVICES, _DEVICE_ALIASES)]


def find_link(name: str) -> Link:
    """The catalogue's link of this name or alias; capitals, spaces and dashes do not matter.

    Raises:
        ClusterError: no such link; the message has the near matches and all names.
    """
    return LINKS[_find("link", name, LINKS, _LINK_ALIASES)]


def _find(what: str, name: str, known: Iterable[str], aliases: Mapping[str, str]) -> str:
    if not isinstance(name, str):
        raise ClusterError(f"the {what} is named by {name!r} ({type(name).__name__}); give a name of the catalogue")
    names = {_plain(key): key for key in known} | {_plain(key): value for key, value in aliases.items()}
    key = _plain(name)
    if key in names:
        return names[key]
    near = sorted({names[match] for match in difflib.get_close_matches(key, names, n=4, cutoff=0.6)})
    near = near or sorted({value for plain, value in names.items() if key and key in plain})
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ClusterError(
        f"unknown {what} {name!r}; {hint}the catalogue has {', '.join(sorted(known))}; "
        f"for another, make a {what.capitalize()} with its figures (in JSON: spell it out)"
    )


def _plain(name: str) -> str:
    return "".join(char for char in name.lower().removeprefix("nvidia").removeprefix("amd") if char.isalnum())
