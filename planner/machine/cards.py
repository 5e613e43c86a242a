"""Lists NVIDIA's graphics cards since Turing that have at least 8 GB, with their maker's figures, one card a line.

The figures are NVIDIA's, as its architecture papers (Turing, Ampere, Ada, RTX Blackwell, Hopper) and data sheets give
them; cores, clocks and memory were compared with TechPowerUp's database. A card stays out if its figures were not
found, or if sources differ: the laptops of the 50 series, RTX 5880 Ada, RTX 5090 D, RTX PRO 2000 to 5000. Boards with
several GPUs stay out, too. A machine with such a card can be described in a file (docs/reference/plan-files.md).

The columns:

- `GiB`: memory; an H200, sold with 141 GB, has 140 GiB (on the one measured, 136 GiB were free for a job). `GB/s`: its
  bandwidth, which is `bus` (bits) × `Gbps` / 8 (gigabits per second and pin).
- `FP32`: TFLOP/s without tensor cores, which is 2 × `cores` × `MHz`. `MHz`: the boost clock of the reference card. A
  laptop's is the highest of the range that NVIDIA lists, reached at the highest power limit; at the lowest it is 57 to
  80% of that.
- `BF16`: TFLOP/s of the tensor cores with FP32 accumulation, dense. GeForce cards have twice FP32 (GA10x: 4 tensor
  cores × 64 multiply-adds per clock and multiprocessor against 128 lanes; Ada and Blackwell keep the ratio),
  workstation cards four times; L40 has twice, by its data sheet. "-": Turing's tensor cores know no bf16; PyTorch
  emulates it, at the rate of FP32 at best.
- `link`: the card's own. Makers of laptops often connect half of its lanes.
- `host`: the usual machine around the card, a name of `HOSTS`.
"""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine without its card: its memory, and that memory's bandwidth."""

    memory_bytes: int
    bytes_per_s: float


HOSTS = {
    "ddr4": Host(memory_bytes=64 * _GIB, bytes_per_s=51.2e9),  # two channels of DDR4-3200
    "ddr5": Host(memory_bytes=64 * _GIB, bytes_per_s=89.6e9),  # two channels of DDR5-5600
    "laptop4": Host(memory_bytes=32 * _GIB, bytes_per_s=51.2e9),  # two channels of DDR4-3200
    "laptop5": Host(memory_bytes=32 * _GIB, bytes_per_s=76.8e9),  # two channels of DDR5-4800
    "server4": Host(memory_bytes=512 * _GIB, bytes_per_s=204.8e9),  # eight channels of DDR4-3200
    "server5": Host(memory_bytes=512 * _GIB, bytes_per_s=307.2e9),  # eight channels of DDR5-4800
}

_TABLE = """
name                GiB   GB/s   bus   Gbps   FP32  cores   MHz    BF16  link      host    title
rtx2060-12gb         12  336.0   192   14.0   7.18   2176  1650       -  pcie3x16  ddr4    GeForce RTX 2060 12 GB
rtx2060super          8  448.0   256   14.0   7.18   2176  1650       -  pcie3x16  ddr4    GeForce RTX 2060 Super
rtx2070               8  448.0   256   14.0  7.465   2304  1620       -  pcie3x16  ddr4    GeForce RTX 2070
rtx2070super          8  448.0   256   14.0  9.062   2560  1770       -  pcie3x16  ddr4    GeForce RTX 2070 Super
rtx2080               8  448.0   256   14.0  10.07   2944  1710       -  pcie3x16  ddr4    GeForce RTX 2080
rtx2080super          8  496.0   256   15.5  11.15   3072  1815       -  pcie3x16  ddr4    GeForce RTX 2080 Super
rtx2080ti            11  616.0   352   14.0  13.45   4352  1545       -  pcie3x16  ddr4    GeForce RTX 2080 Ti
titanrtx             24  672.0   384   14.0  16.31   4608  1770       -  pcie3x16  ddr4    Titan RTX
t1000-8gb             8  160.0   128   10.0    2.5    896  1395       -  pcie3x16  ddr4    T1000 8 GB
quadrortx4000         8  416.0   256   13.0  7.119   2304  1545       -  pcie3x16  ddr4    Quadro RTX 4000
quadrortx5000        16  448.0   256   14.0  11.15   3072  1815       -  pcie3x16  ddr4    Quadro RTX 5000
quadrortx6000        24  672.0   384   14.0  16.31   4608  1770       -  pcie3x16  ddr4    Quadro RTX 6000
quadrortx8000        48  672.0   384   14.0  16.31   4608  1770       -  pcie3x16  ddr4    Quadro RTX 8000
t4                   16  320.0   256   10.0  8.141   2560  1590       -  pcie3x16  server4 T4
rtx3050               8  224.0   128   14.0  9.098   2560  1777    18.2  pcie4x8   ddr4    GeForce RTX 3050 8 GB
rtx3060              12  360.0   192   15.0  12.74   3584  1777   25.48  pcie4x16  ddr4    GeForce RTX 3060 12 GB
rtx3060-8gb           8  240.0   128   15.0  12.74   3584  1777   25.48  pcie4x16  ddr4    GeForce RTX 3060 8 GB
rtx3060ti             8  448.0   256   14.0   16.2   4864  1665    32.4  pcie4x16  ddr4    GeForce RTX 3060 Ti
rtx3070               8  448.0   256   14.0  20.31   5888  1725   40.62  pcie4x16  ddr4    GeForce RTX 3070
rtx3070ti             8  608.0   256   19.0  21.75   6144  1770    43.5  pcie4x16  ddr4    GeForce RTX 3070 Ti
rtx3080              10  760.0   320   19.0  29.77   8704  1710   59.54  pcie4x16  ddr4    GeForce RTX 3080 10 GB
rtx3080-12gb         12  912.0   384   19.0  30.64   8960  1710   61.28  pcie4x16  ddr4    GeForce RTX 3080 12 GB
rtx3080ti            12  912.0   384   19.0   34.1  10240  1665    68.2  pcie4x16  ddr4    GeForce RTX 3080 Ti
rtx3090              24  936.2   384   19.5  35.58  10496  1695   71.16  pcie4x16  ddr4    GeForce RTX 3090
rtx3090ti            24 1008.0   384   21.0   40.0  10752  1860    80.0  pcie4x16  ddr4    GeForce RTX 3090 Ti
rtx3070-laptop        8  448.0   256   14.0  16.59   5120  1620   33.18  pcie4x16  laptop4 GeForce RTX 3070 Laptop
rtx3070ti-laptop      8  448.0   256   14.0  17.49   5888  1485   34.98  pcie4x16  laptop4 GeForce RTX 3070 Ti Laptop
rtx3080-laptop        8  448.0   256   14.0  21.01   6144  1710   42.02  pcie4x16  laptop4 GeForce RTX 3080 Laptop 8 GB
rtx3080-laptop-16gb  16  448.0   256   14.0  21.01   6144  1710   42.02  pcie4x16  laptop4 GeForce RTX 3080 Laptop 16 GB
rtx3080ti-laptop     16  512.0   256   16.0  23.61   7424  1590   47.22  pcie4x16  laptop4 GeForce RTX 3080 Ti Laptop
a1000                 8  192.0   128   12.0  6.737   2304  1462   26.95  pcie4x8   ddr4    RTX A1000
a2000-12gb           12  288.0   192   12.0  7.987   3328  1200   31.95  pcie4x16  ddr4    RTX A2000 12 GB
a4000                16  448.0   256   14.0  19.17   6144  1560   76.68  pcie4x16  ddr4    RTX A4000
a4500                20  640.0   320   16.0  23.65   7168  1650    94.6  pcie4x16  ddr4    RTX A4500
a5000                24  768.0   384   16.0  27.77   8192  1695   111.1  pcie4x16  ddr4    RTX A5000
a5500                24  768.0   384   16.0   34.1  10240  1665   136.4  pcie4x16  ddr4    RTX A5500
a6000                48  768.0   384   16.0  38.71  10752  1800   154.8  pcie4x16  ddr4    RTX A6000
a2                   16  200.0   128   12.5  4.531   1280  1770   18.12  pcie4x8   server4 A2
a10                  24  600.0   384   12.5  31.24   9216  1695   125.0  pcie4x16  server4 A10
a30                  24  933.0  3072   2.43  10.32   3584  1440   165.0  pcie4x16  server4 A30
a40                  48  696.0   384   14.5  37.42  10752  1740   149.7  pcie4x16  server4 A40
a100-pcie-40gb       40 1555.0  5120   2.43   19.5   6912  1410   312.0  pcie4x16  server4 A100 PCIe 40 GB
a100-40gb            40 1555.0  5120   2.43   19.5   6912  1410   312.0  pcie4x16  server4 A100 SXM 40 GB
a100-pcie            80 1935.0  5120  3.024   19.5   6912  1410   312.0  pcie4x16  server4 A100 PCIe 80 GB
a100                 80 2039.0  5120  3.186   19.5   6912  1410   312.0  pcie4x16  server4 A100 SXM 80 GB
rtx4060               8  272.0   128   17.0  15.11   3072  2460   30.22  pcie4x8   ddr5    GeForce RTX 4060
rtx4060ti-8gb         8  288.0   128   18.0  22.06   4352  2535   44.12  pcie4x8   ddr5    GeForce RTX 4060 Ti 8 GB
rtx4060ti            16  288.0   128   18.0  22.06   4352  2535   44.12  pcie4x8   ddr5    GeForce RTX 4060 Ti 16 GB
rtx4070              12  504.0   192   21.0  29.15   5888  2475    58.3  pcie4x16  ddr5    GeForce RTX 4070
rtx4070super         12  504.0   192   21.0  35.48   7168  2475   70.96  pcie4x16  ddr5    GeForce RTX 4070 Super
rtx4070ti            12  504.0   192   21.0  40.09   7680  2610   80.18  pcie4x16  ddr5    GeForce RTX 4070 Ti
rtx4070tisuper       16  672.3   256   21.0   44.1   8448  2610    88.2  pcie4x16  ddr5    GeForce RTX 4070 Ti Super
rtx4080              16  716.8   256   22.4  48.74   9728  2505   97.48  pcie4x16  ddr5    GeForce RTX 4080
rtx4080super         16  736.0   256   23.0  52.22  10240  2550  104.44  pcie4x16  ddr5    GeForce RTX 4080 Super
rtx4090              24 1008.0   384   21.0  82.58  16384  2520  165.16  pcie4x16  ddr5    GeForce RTX 4090
rtx4090d             24 1008.0   384   21.0  73.54  14592  2520  147.08  pcie4x16  ddr5    GeForce RTX 4090 D
rtx4060-laptop        8  256.0   128   16.0  14.56   3072  2370   29.12  pcie4x8   laptop5 GeForce RTX 4060 Laptop
rtx4070-laptop        8  256.0   128   16.0  20.04   4608  2175   40.08  pcie4x8   laptop5 GeForce RTX 4070 Laptop
rtx4080-laptop       12  432.0   192   18.0  33.85   7424  2280    67.7  pcie4x16  laptop5 GeForce RTX 4080 Laptop
rtx4090-laptop       16  576.0   256   18.0  39.69   9728  2040   79.38  pcie4x16  laptop5 GeForce RTX 4090 Laptop
rtx2000ada           16  256.0   128   16.0   12.0   2816  2130    48.0  pcie4x8   ddr5    RTX 2000 Ada
rtx4000sffada        20  280.0   160   14.0  19.17   6144  1560   76.68  pcie4x16  ddr5    RTX 4000 SFF Ada
rtx4000ada           20  360.0   160   18.0  26.73   6144  2175   106.9  pcie4x16  ddr5    RTX 4000 Ada
rtx4500ada           24  432.0   192   18.0  39.63   7680  2580   158.5  pcie4x16  ddr5    RTX 4500 Ada
rtx5000ada           32  576.0   256   18.0  65.28  12800  2550   261.1  pcie4x16  ddr5    RTX 5000 Ada
rtx6000ada           48  960.0   384   20.0  91.06  18176  2505   364.2  pcie4x16  ddr5    RTX 6000 Ada
l4                   24  300.0   192   12.5  30.29   7424  2040   121.0  pcie4x16  server5 L4
l40                  48  864.0   384   18.0  90.52  18176  2490  181.05  pcie4x16  server5 L40
l40s                 48  864.0   384   18.0  91.61  18176  2520  362.05  pcie4x16  server5 L40S
rtx5050               8  320.0   128   20.0  13.17   2560  2572   26.34  pcie5x8   ddr5    GeForce RTX 5050
rtx5060               8  448.0   128   28.0  19.18   3840  2497   38.36  pcie5x8   ddr5    GeForce RTX 5060
rtx5060ti-8gb         8  448.0   128   28.0   23.7   4608  2572    47.4  pcie5x8   ddr5    GeForce RTX 5060 Ti 8 GB
rtx5060ti            16  448.0   128   28.0   23.7   4608  2572    47.4  pcie5x8   ddr5    GeForce RTX 5060 Ti 16 GB
rtx5070              12  672.0   192   28.0  30.87   6144  2512   61.74  pcie5x16  ddr5    GeForce RTX 5070
rtx5070ti            16  896.0   256   28.0  43.94   8960  2452   87.88  pcie5x16  ddr5    GeForce RTX 5070 Ti
rtx5080              16  960.0   256   30.0  56.28  10752  2617  112.56  pcie5x16  ddr5    GeForce RTX 5080
rtx5090              32 1792.0   512   28.0  104.8  21760  2407   209.6  pcie5x16  ddr5    GeForce RTX 5090
rtxpro6000-maxq      96 1792.0   512   28.0  109.7  24064  2280   438.9  pcie5x16  ddr5    RTX PRO 6000 Blackwell Max-Q
rtxpro6000           96 1792.0   512   28.0  126.0  24064  2617   503.8  pcie5x16  ddr5    RTX PRO 6000 Blackwell
h100-pcie            80 2039.0  5120  3.186  51.22  14592  1755   756.0  pcie5x16  server5 H100 PCIe 80 GB
h100-nvl             94 3938.0  6016  5.238  60.32  16896  1785   835.5  pcie5x16  server5 H100 NVL 94 GB
h100                 80 3350.0  5120  5.234   66.9  16896  1980   989.4  pcie5x16  server5 H100 SXM 80 GB
h200                140 4800.0  6144   6.25   66.9  16896  1980   989.4  pcie5x16  server5 H200 SXM 141 GB
b200                180 7700.0  8192   7.52   74.5  18944  1965  2250.0  pcie5x16  server5 B200 SXM 180 GB
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A graphics card in a typical machine. `name`: for people. `link`: a name of `planner.machine.presets.LINKS`.
    `bf16_flops_per_s`: None for a card without tensor cores for bf16. `host`: a name of `HOSTS`. The maker's figures of
    which `memory_bytes_per_s` and `fp32_flops_per_s` are products: `bus_bits`, `bits_per_s` (per pin), `cores` and
    `clock_hz`."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    bus_bits: int
    bits_per_s: float
    fp32_flops_per_s: float
    cores: int
    clock_hz: float
    bf16_flops_per_s: float | None
    link: str
    host: str


def _card(line: str) -> tuple[str, Card]:
    """The name and the card in a line of the table."""
    name, gib, gb_per_s, bus, gbps, fp32, cores, mhz, bf16, link, host, title = line.split(maxsplit=11)
    return name, Card(
        name=title,
        memory_bytes=int(gib) * _GIB,
        memory_bytes_per_s=float(gb_per_s) * 1e9,
        bus_bits=int(bus),
        bits_per_s=float(gbps) * 1e9,
        fp32_flops_per_s=float(fp32) * 1e12,
        cores=int(cores),
        clock_hz=float(mhz) * 1e6,
        bf16_flops_per_s=None if bf16 == "-" else float(bf16) * 1e12,
        link=link,
        host=host,
    )


CARDS = dict(_card(line) for line in _TABLE.strip().splitlines()[1:])
"""Each card by its short name, the older ones first. A name without a size stands for the most usual memory."""

USUAL = (
    "rtx5060",
    "rtx5070",
    "rtx5060ti",
    "rtx4090",
    "rtx5090",
    "rtx6000ada",
    "a100",
    "rtxpro6000",
    "h200",
    "b200",
)
"""The card that is usually bought for its memory, from the smallest memory to the largest: the newest GeForce, of
several the cheapest, where one has that memory."""
