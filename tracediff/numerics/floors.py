"""How far honest arithmetic can be from exact: a floor per element, from the numbers that an op adds up.

A rounding errs by at most half a unit, u = 2^-24 of the value in float32, uniformly: variance u^2 / 3 of the
value's square. Summing n terms in sequence rounds n partial sums. With Q the sum of squares of the terms and y
their sum, the j-th partial sum has a mean square of j Q / n + (j / n)^2 y^2, so

    variance of the error = u^2 / 3 * (n Q / 2 + n y^2 / 3).

Where one massive term makes most of Q and comes first, every partial sum has it: n Q in place of n Q / 2 is the most
that an order can make, and what is allowed. (With half of it a value of a right float32 matmul of a loud model was
seen 1.6% beyond its bound.)

Sequential order is the worst that engines use; vector units keep 8 to 64 partial sums, and err less by the root
of that. What follows the storage of the result, or is not random (an angle that a float32 cannot hold), is a
hard bound instead. No formula here knows of an engine; each kind of op has its own in `kinds`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Half a unit in the last place of 1.0, and the smallest positive number (IEEE 754; bfloat16 as float32).
UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
# What a tensor core cuts off below: a whole unit of float32; of fp8 products on Hopper one of 14 bits, as measured by
# DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3.2).
UNIT |= {"tensor cores": 2.0**-23, "fp8 tensor cores": 2.0**-13}
# Products that are added to a sum at once: four on Volta, more since, but in TF32 an H200 lost what it would one by
# one. Of fp8 as many as cover what it lost over 512 to 8,192 terms, with float32 between every 128 of them and without
# (use_fast_accum of PyTorch): the worst of 1.5 million sums was 2.9 standard deviations off (docs/cuda.md). With
# float32 between 32 were enough, for a third of the standard deviation; no record tells beforehand which it is.
TOGETHER = {"tensor cores": 1, "fp8 tensor cores": 4}
TINY = {"f64": 2.0**-1022, "f32": 2.0**-126, "f16": 2.0**-24, "bf16": 2.0**-126}
# The chance that the largest of all elements of an op passes its bound by luck, and that the whole of them passes
# its own: one false alarm in a million ops.
LUCK = 1e-6
# The whole op's squared error may exceed its expectation by what the model of the noise neglects, too.
_MARGIN = 4.0


@dataclass(frozen=True, slots=True)
class Noise:
    """Of each element of an output: the standard deviation of its error, and a bound on what is not random.

    `turned` is what an element may err by besides because a rounding went the other way: that is rare, so `sigma`
    tells how often, and the whole is not allowed it. `alike` elements err by one factor: a norm divides a row by one
    sum.
    """

    sigma: Tensor
    hard: Tensor
    turned: Tensor | None = None
    alike: int = 1

    def bound(self, n: int | None = None) -> Tensor:
        """What no element's error exceeds, but for one op in a million (Gaussian tail over all its `n` elements, where
        these are a part of them).
        """
        tail = math.sqrt(2 * math.log(max(n or self.sigma.numel(), 2) / LUCK))
        bound = torch.add(self.hard, self.sigma, alpha=tail)
        return bound if self.turned is None else bound.add_(self.turned)

    def mapped(self, of: Callable[[Tensor], Tensor]) -> "Noise":
        """Some of the elements, or all in another shape, as a function makes them of each tensor."""
        turned = None if self.turned is None else of(self.turned)
        return replace(self, sigma=of(self.sigma), hard=of(self.hard), turned=turned)

    @classmethod
    def joined(cls, parts: "Sequence[Noise]", cat: Callable[[Sequence[Tensor]], Tensor]) -> "Noise":
        """Of parts of the elements that of all, as a function joins them."""
        turned = [part.turned if part.turned is not None else torch.zeros_like(part.sigma) for part in parts]
        return replace(
            parts[0],
            sigma=cat([part.sigma for part in parts]),
            hard=cat([part.hard for part in parts]),
            turned=cat(turned) if any(part.turned is not None for part in parts) else None,
        )

    def part(self, cut: slice) -> "Noise":
        """Some of the elements, flat."""
        return self.mapped(lambda x: x.flatten()[cut])

    def without(self, lost: Tensor) -> "Noise":
        """None at the elements that are `lost`, bool of the same shape."""
        return replace(self, sigma=self.sigma.masked_fill(lost, 0.0), hard=self.hard.masked_fill(lost, 0.0))

    def reshaped(self, shape: Sequence[int]) -> "Noise":
        """The same elements in another shape."""
        return self.mapped(lambda x: x.reshape(shape))

    @property
    def margin(self) -> float:
        """How many times `energy` the squared error may be: the tail of a weighted chi squared with as many degrees of
        freedom as errors are independent (https://doi.org/10.1214/aos/1015957395, lemma 1).

        Of many alike that is near 1. The sum of squares of a single token is one: a right float32 engine that added it
        up in sequence was off by 1.5 times 4 times its expectation, in one token of ten. And where one massive value
        makes most of the energy it is as if there were one: a right SwiGLU was off by 4.2 times the expectation.
        """
        alike = self.alike if self.sigma.numel() % self.alike == 0 else 1
        each = self.sigma.flatten() if alike == 1 else torch.linalg.vector_norm(self.sigma.reshape(-1, alike), dim=1)
        largest = float(each.amax()) if each.numel() else 0.0
        together = max(float(torch.linalg.vector_norm(each.double())), largest)  # squares may be too small for a number
        rare = -math.log(LUCK) * (largest / together) ** 2 if largest else 0.0
        return max(_MARGIN, 1 + 2 * math.sqrt(rare) + 2 * rare)

    def energy(self) -> float:
        """The sum over all elements of the mean square of their errors."""
        sigma, hard = self.sigma.flatten(), self.hard.flatten()
        return float(sigma @ sigma + hard @ hard / 3)


def variance_of_sums(terms: float, squares: Tensor, y: Tensor) -> Tensor:
    """In units u^2, in the place of `squares`: of sums `y` of so many terms whose squares add up to `squares`."""
    return squares.mul_(terms / 3).addcmul_(y, y, value=terms / 9)


def variance_of_truncated_sums(terms: int, squares: Tensor, y: Tensor) -> Tensor:
    """The same of sums on tensor cores, in units u^2 of what they cut off below.

    Products are exact. A few at a time are aligned with the sum so far to the largest of them, cut off, and added
    (Fasi, Higham, Mikaitis, Pranesh 2021, "Numerical behavior of NVIDIA tensor cores"; later chips keep a few guard
    bits, which only lessens it). So each loses up to a unit of the sum so far, as in a sequence of roundings, but
    always towards zero: where they have one sign that adds up. Of n terms of one size sqrt(n / Q) |y| more have the
    sign of the sum than the other, and lose half a unit of what the sum is on the way, |y| / 2 + 2 / 3 sqrt(Q):

        loss = u / 2 sqrt(n / Q) |y| (|y| / 2 + 2 / 3 sqrt(Q)).
    """
    size, root = y.abs(), squares.sqrt()
    loss = size.mul(math.sqrt(terms) / 2).mul_(size.div(2).div_(root.clamp(min=1e-300)).add_(2 / 3))
    return variance_of_sums(terms, squares, y).addcmul_(loss, loss)
