import pytest
import torch

from lockstep.models import resnet18, resnet34, resnet50

pytestmark = pytest.mark.usefixtures("one_thread")

_BUILDERS = {"resnet18": resnet18, "resnet34": resnet34, "resnet50": resnet50}


@pytest.mark.parametrize("name", _BUILDERS)
def test_names_shapes_and_initial_values_are_torchvisions(name, torchvision):
    torch.manual_seed(3)
    theirs = getattr(torchvision.models, name)(num_classes=5).state_dict()
    torch.manual_seed(3)
    ours = _BUILDERS[name](num_classes=5).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each != "resnet18")) for each in _BUILDERS]
)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_gradients_and_statistics_equal_torchvisions_bit_for_bit(name, training, torchvision):
    theirs = getattr(torchvision.models, name)(num_classes=7).train(training)
    ours = _BUILDERS[name](num_classes=7).train(training)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 32, 32)
    outputs = [model(images) for model in (theirs, ours)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for own, other in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(own.grad, other.grad)
    for own, other in zip(ours.buffers(), theirs.buffers()):
        assert torch.equal(own, other)


@pytest.mark.slow
def test_a_zeroed_residual_branch_is_torchvisions(torchvision):
    for name, build in _BUILDERS.items():
        torch.manual_seed(0)
        theirs = getattr(torchvision.models, name)(zero_init_residual=True).state_dict()
        torch.manual_seed(0)
        ours = build(zero_init_residual=True).state_dict()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_small_images_keep_their_resolution_until_the_layers():
    model = resnet18(num_classes=10, small_images=True)
    seen = {}
    model.layer1.register_forward_pre_hook(lambda _, inputs: seen.update(shape=inputs[0].shape))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert seen["shape"] == (2, 64, 32, 32)
    assert list(model.state_dict()) == list(resnet18(num_classes=10).state_dict())
