from lockstep.profile.trace import TraceSpan, events

USED = {"epoch": 0, "first": 7}
SPANS = [
    TraceSpan("forward", "forward k0", 5_000, 9_000, {"step": 2, **USED}),
    TraceSpan("device, stream 7", "gemm", 6_000, 8_000),
    TraceSpan("step", "step 2", 0, 20_000),
    TraceSpan("loader, worker 1", "step 2 k0", 1_000, 4_000, USED),
    TraceSpan("loader (evaluation), worker 0", "8 samples", 10_000, 11_000, {"epoch": -1, "first": 7}),
    TraceSpan("data", "wait", 0, 5_000),
]


def made(spans=SPANS):
    return events(spans, rank=3, title="rank 3 (ddp, cpu)", origin=0)


def test_a_rank_is_a_process_and_its_lanes_stand_from_steps_to_the_device():
    names = {event["tid"]: event["args"]["name"] for event in made() if event["name"] == "thread_name"}
    assert [names[lane] for lane in sorted(names)] == [
        *("steps", "loader, worker 1", "loader (evaluation), worker 0"),
        *("waiting for data", "forward", "device, stream 7"),
    ]
    assert {event["pid"] for event in made()} == {3}
    titles = [event["args"]["name"] for event in made() if event["name"] == "process_name"]
    assert titles == ["rank 3 (ddp, cpu)"]


def test_moments_are_microseconds_from_the_origin():
    (span,) = (
        event
        for event in events([TraceSpan("data", "wait", 1_500, 4_000)], rank=0, title="", origin=500)
        if event["ph"] == "X"
    )
    assert (span["ts"], span["dur"], span["cat"]) == (1.0, 2.5, "waiting for data")


def test_an_arrow_goes_from_where_a_micro_batch_was_read_to_where_it_is_used():
    start, end = (event for event in made() if event["ph"] in "sf")
    assert (start["ph"], start["ts"], end["ph"], end["ts"]) == ("s", 3.0, "f", 5.0)
    assert start["id"] == end["id"] and start["tid"] != end["tid"]


def test_a_micro_batch_that_is_read_again_is_used_from_its_newest_reading():
    reading = [TraceSpan("loader, worker 0", "", at, at + 2_000, USED) for at in (0, 10_000, 30_000)]
    use = [TraceSpan("forward", "forward k0", at, at + 1_000, USED) for at in (13_000, 14_000, 20_000)]
    arrows = [event["ts"] for event in made(reading + use) if event["ph"] in "sf"]
    assert arrows == [11.0, 13.0]
