import numpy as np

from lockstep.data.keyed import SampleKeys


def test_uniforms_of_a_sample_do_not_depend_on_the_micro_batch_it_is_in():
    together = SampleKeys(5, 1, np.array([3, 9, 4])).uniforms(7)
    alone = SampleKeys(5, 1, np.array([9])).uniforms(7)
    fewer = SampleKeys(5, 1, np.array([9])).uniforms(2)
    assert np.array_equal(together[1], alone[0])
    assert np.array_equal(fewer[0], alone[0, :2])


def test_uniforms_differ_by_seed_epoch_and_sample():
    drawn = {
        tuple(SampleKeys(seed, epoch, np.array([index])).uniforms(4)[0])
        for seed in (0, 1)
        for epoch in (-1, 0, 1)
        for index in (0, 1, 2)
    }
    assert len(drawn) == 18


def test_uniforms_are_spread_evenly_over_zero_to_one():
    drawn = SampleKeys(0, 0, np.arange(4000)).uniforms(5)
    assert drawn.min() >= 0.0 and drawn.max() < 1.0
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-squared with 19 degrees of freedom, p about 0.0001
    assert abs(np.corrcoef(drawn.T)[np.triu_indices(5, 1)]).max() < 0.06
