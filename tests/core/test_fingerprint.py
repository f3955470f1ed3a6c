"""A fingerprint is equal exactly if all bits are, and names the tensor that is not."""

import dataclasses
import hashlib
import json
import platform

import pytest
import torch

from lockstep.core import fingerprint
from lockstep.core.fingerprint import (
    Context,
    checksum,
    checksums,
    combine,
    cpu_of,
    device_model,
    digest_tensor,
    memory_of,
    octets,
)

CONTEXT = Context(
    global_batch=64,
    micro_batches=8,
    seed=0,
    precision="fp32",
    reduce="ordered",
    threads=1,
    device="x86_64 AVX2",
    torch="2.13.0",
    optimizers=("torch.optim.sgd.SGD default",),
)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def test_a_digest_is_sha256_of_type_shape_and_bytes():
    tensor = torch.tensor([[1.0, -2.0]])
    expected = hashlib.sha256(b"torch.float32(1, 2)" + bytes.fromhex("0000803f000000c0")).hexdigest()
    assert digest_tensor(tensor) == expected


def test_a_fingerprint_is_the_hash_of_sorted_names_and_digests():
    lines = "a 11\nb 22\n"
    assert combine({"b": "22", "a": "11"}) == hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_anywhere_changes_the_digest(dtype):
    tensor = torch.ones(5, 3).to(dtype)
    digests = {digest_tensor(tensor)}
    octets = tensor.view(torch.uint8).view(-1)
    for position in range(len(octets)):
        octets[position] ^= 1
        digests.add(digest_tensor(tensor))
        octets[position] ^= 1
    assert len(digests) == len(octets) + 1


def test_the_sign_of_zero_and_the_payload_of_nan_are_seen():
    assert digest_tensor(torch.tensor(0.0)) != digest_tensor(torch.tensor(-0.0))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest_tensor(nans[0]) != digest_tensor(nans[1])
    assert digest_tensor(nans[0]) == digest_tensor(nans[0].clone())


def test_type_and_shape_are_seen():
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, 1), torch.zeros(2, dtype=torch.float64)]
    zeros += [torch.zeros(0), torch.zeros(0, 3), torch.zeros(()), torch.zeros(1)]
    assert len({digest_tensor(zero) for zero in zeros}) == len(zeros)


def test_memory_layout_is_not_seen():
    tensor = torch.randn(2, 3, 4, 5)
    expected = digest_tensor(tensor)
    assert digest_tensor(tensor.contiguous(memory_format=torch.channels_last)) == expected
    assert digest_tensor(tensor.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)) == expected
    assert digest_tensor(torch.randn(3, 2, 3, 4, 5).copy_(tensor.expand(3, -1, -1, -1, -1))[1]) == expected


def test_a_single_number_may_have_a_stride_of_zero():
    """As in the buffers of Pyro's guides, which are made by ``expand``."""
    number = torch.ones(()).expand(1)
    assert number.stride() == (0,)
    assert digest_tensor(number) == digest_tensor(torch.ones(1))
    assert torch.equal(checksum(number), checksum(torch.ones(1)))


def test_a_tensor_that_was_looked_at_can_be_resized():
    """After ``Tensor.numpy`` torch refuses to, in an observer of quantization or with ``out=`` of another size."""
    for tensor in (
        torch.empty(0),
        torch.arange(3.0),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor(2j),
    ):
        assert bytes(memory_of(tensor)) == octets(tensor).clone().numpy().tobytes()
        digest_tensor(tensor)
        assert tensor.resize_(7).shape == (7,)


def test_a_parameter_is_hashed_by_its_values():
    values = torch.randn(3)
    assert digest_tensor(torch.nn.Parameter(values)) == digest_tensor(values)


def test_a_context_survives_json_and_names_what_differs():
    stored = json.loads(json.dumps(CONTEXT.as_dict()))
    assert CONTEXT.differences(stored) == []
    other = dataclasses.replace(CONTEXT, threads=2, optimizers=())
    assert other.differences(stored) == [
        "threads: 1 there, 2 here",
        "optimizers: ['torch.optim.sgd.SGD default'] there, [] here",
    ]


def test_a_context_without_an_entry_differs_in_it():
    stored = {name: value for name, value in CONTEXT.as_dict().items() if name != "deterministic"}
    assert CONTEXT.differences(stored) == ["deterministic: None there, False here"]


def test_the_world_is_no_part_of_the_context():
    assert not {"world_size", "rank", "strategy", "workers"} & CONTEXT.as_dict().keys()


def test_a_cpu_is_named_by_its_vector_instructions():
    assert torch.backends.cpu.get_cpu_capability() in device_model(torch.device("cpu"))


def arm_cpu(parts, features):
    return "".join(
        f"processor\t: {n}\nFeatures\t: {features}\nCPU implementer\t: 0x41\nCPU part\t: {part}\n\n"
        for n, part in enumerate(parts)
    )


def test_an_arm_cpu_is_named_by_its_cores_and_their_instructions(monkeypatch, tmp_path):
    """All of them were one CPU, so that a run went on under code of other bits without a word."""
    info, cpu, found = tmp_path / "cpuinfo", torch.device("cpu"), set()
    monkeypatch.setattr(fingerprint, "_CPU_INFO", info)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for parts, features in (
        (["0xd0c"] * 2, "fp asimd asimdhp"),
        (["0xd40"] * 2, "fp asimd asimdhp"),
        (["0xd40"] * 2, "fp asimd asimdhp sve i8mm bf16"),
        (["0xd40", "0xd0c"], "fp asimd asimdhp"),
    ):
        info.write_text(arm_cpu(parts, features))
        found.add((cpu_of(cpu), device_model(cpu)))
    assert len(found) == 4
    assert cpu_of(cpu).startswith("0x41 0xd40 0xd0c ")
    info.write_text(arm_cpu(["0xd40"], "asimdhp sve bf16"))
    monkeypatch.setattr(fingerprint, "has_mkl", lambda: False)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "NEOVERSEV1")
    assert device_model(cpu).endswith(" asimdhp bf16 sve OPENBLAS_CORETYPE=NEOVERSEV1")


def test_variables_by_which_libraries_choose_other_code_are_part_of_the_device(monkeypatch):
    """With MKL_CBWR=COMPATIBLE products of matrices have other bits; a resumed run went on in them without a word."""
    device = torch.device("cpu")
    before = device_model(device)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert device_model(device) == f"{before} MKL_CBWR=COMPATIBLE"
    assert device_model(device, portable=True) == "any x86_64 with AVX2"


def test_the_maker_of_the_cpu_and_its_library_of_products_count_where_both_sides_know_them():
    known = cpu_of(torch.device("cpu"))
    assert known.endswith("MKL" if torch.backends.mkl.is_available() else "without MKL")
    assert len(known.split()[0]) > 2  # GenuineIntel, AuthenticAMD, aarch64
    assert cpu_of(torch.device("cuda")) == ""
    here = dataclasses.replace(CONTEXT, cpu=known)
    assert here.differences({**here.as_dict(), "cpu": "Other MKL"}) == [f"cpu: 'Other MKL' there, {known!r} here"]
    assert here.differences({**here.as_dict(), "cpu": ""}) == []


def test_what_photos_are_decoded_to_counts_once_both_sides_have_read_some():
    here = dataclasses.replace(CONTEXT, photos="ab12")
    assert here.differences({**here.as_dict(), "photos": "cd34"}) == ["photos: 'cd34' there, 'ab12' here"]
    assert here.differences(CONTEXT.as_dict()) == CONTEXT.differences(here.as_dict()) == []
    assert not here.differences({name: value for name, value in CONTEXT.as_dict().items() if name != "photos"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 1000])
def test_a_checksum_is_of_all_bits_and_their_places(dtype, count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert checksum(values).equal(checksum(values.clone()))
    assert checksum(torch.cat([values[:1], values])[1:]).equal(checksum(values))  # at another address
    for place in range(0, count, 97):
        other = values.clone()
        other.view(torch.uint8)[place * values.element_size()] ^= 1
        assert not checksum(other).equal(checksum(values))
    if count == 1000 and dtype == torch.float32:
        assert not checksum(values.flip(0)).equal(checksum(values))


def test_checksums_do_not_depend_on_strides():
    image = torch.randn(2, 3, 4, 5)
    first, second = image, image.to(memory_format=torch.channels_last)
    cpu = torch.device("cpu")
    assert checksums([("a", first)], cpu) == checksums([("a", second)], cpu)
    assert checksums([("a", first), ("b", torch.zeros(()))], cpu)["b"] == "0" * 16
    assert checksums([], cpu) == {}
