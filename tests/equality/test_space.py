"""Models of images split over space and over channels, against one device: loss, gradients, parameters after AdamW, and the
bytes that were sent against those that the plan says."""

from __future__ import annotations

import pytest

from autopar.codegen import generate
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.tracing import trace
from autopar.verifier import verify_traced
from tests.support.images import image_model, slow_links

TOLERANCE = 1e-10


def checked(name: str, forced: Parallelism, shape: tuple[int, ...] | None = None) -> str:
    """The text of the program of a plan so forced, which computes what the model does."""
    model, inputs = image_model(name)
    num_devices = (forced.data or 1) * (forced.tensor or 1) * (forced.spatial or 1)
    options = PlanOptions(parallelism=forced, mesh_shape=shape)
    traced = trace(model, inputs)
    made = plan_graph(traced.graph, slow_links(num_devices), options, compare=False)
    assert not made.report()["fallbacks"], "an operator is not split for want of a rule"
    found = verify_traced(model, traced, made, tolerance=TOLERANCE, count_collectives=True)
    found.require()
    assert found.differences == (), "sent is not what the plan says"
    return generate(made, traced.graph)


def test_resnet_over_rows_and_columns() -> None:
    source = checked("resnet", Parallelism(spatial=4), (2, 2))
    assert "halo(halo(x, 2, mesh.spatial, 3, 2), 3, mesh.spatial2, 3, 2)" in source, "corners come along"
    assert 'float("-inf")' in source, "max pooling is split too"
    assert source.count("halo(") == 8


def test_unet_over_space() -> None:
    source = checked("unet-transposed-group", Parallelism(spatial=3))
    assert source.count("halo(") == 7 and "F.conv_transpose3d(" in source and "group_norm(" in source


def test_fourier_operator_over_space() -> None:
    source = checked("fno2d", Parallelism(spatial=2))
    assert source.count("halo(") == 1 and "torch.fft.rfft2(" in source


def test_fourier_operator_over_channels() -> None:
    assert "halo(" not in checked("fno1d", Parallelism(tensor=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "forced", "shape"),
    [
        *((name, Parallelism(spatial=count), None) for name in ("resnet-deep", "fno1d", "fno2d") for count in (2, 3, 4)),
        *((f"unet-{up}-{norm}", Parallelism(spatial=count), None) for count in (2, 4) for up, norm in (
            ("transposed", "group"), ("trilinear", "batch"), ("nearest", "instance"))),
        *((name, Parallelism(spatial=4), (2, 2)) for name in ("resnet-deep", "unet-trilinear-batch", "fno2d")),
        *((name, Parallelism(tensor=2), None) for name in ("resnet-deep", "unet-transposed-group", "fno2d")),
        *((name, Parallelism(spatial=2, data=2), None) for name in ("resnet-deep", "unet-transposed-group", "fno2d")),
        *((name, Parallelism(spatial=2, tensor=2), None) for name in ("resnet-deep", "unet-transposed-group", "fno2d")),
    ],
)  # fmt: skip
def test_split_models(name: str, forced: Parallelism, shape: tuple[int, ...] | None) -> None:
    source = checked(name, forced, shape)
    assert ("halo(" in source) == (forced.spatial is not None)
