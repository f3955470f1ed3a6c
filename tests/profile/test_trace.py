from lockstep.profile.trace import SpanRecorder, TraceSpan


def spans(recorder):
    return [(span.lane, span.name, span.began, span.ended) for span in recorder.spans]


def test_each_phase_ends_where_the_next_begins():
    recorder = SpanRecorder()
    recorder.enter("data", 10, step=3)
    recorder.enter("forward", 20, step=3, micro_batch=1)
    recorder.enter("backward", 35, step=3, micro_batch=1)
    recorder.enter("", 50)
    assert spans(recorder) == [
        ("data", "wait", 10, 20),
        ("forward", "forward k1", 20, 35),
        ("backward", "backward k1", 35, 50),
    ]
    assert recorder.spans[1].about == {"step": 3}


def test_threads_do_not_end_each_others_phases_and_have_lanes_of_their_own():
    recorder = SpanRecorder()
    recorder.enter("compute", 0)
    recorder.enter("forward", 1, micro_batch=0, thread=1)
    recorder.enter("forward", 2, micro_batch=1, thread=2)
    recorder.close(9)
    assert sorted(spans(recorder)) == [
        ("compute", "compute", 0, 9),
        ("replica thread 1", "forward k0", 1, 9),
        ("replica thread 2", "forward k1", 2, 9),
    ]


def test_what_becomes_known_of_a_phase_is_kept_with_it():
    recorder = SpanRecorder()
    recorder.enter("forward", 0, micro_batch=2)
    recorder.label(first=17, epoch=1)
    recorder.label(thread=5, first=3)
    recorder.close(1)
    assert recorder.spans == [TraceSpan("forward", "forward k2", 0, 1, {"first": 17, "epoch": 1})]


def test_a_step_lasts_from_its_wait_for_data_to_the_next_one():
    recorder = SpanRecorder()
    recorder.begin_step(0, 0)
    recorder.enter("forward", 1)
    recorder.begin_step(1, 10)
    recorder.begin_step(1, 30)
    recorder.enter("compute", 31)
    recorder.close(40)
    steps = [span for span in recorder.spans if span.lane == "step"]
    assert [(span.name, span.began, span.ended) for span in steps] == [("step 0", 0, 10), ("step 1", 30, 40)]


def test_a_step_that_was_never_computed_is_none():
    recorder = SpanRecorder()
    recorder.begin_step(7, 0)
    recorder.enter("evaluate", 1)
    recorder.close(9)
    assert [span.lane for span in recorder.spans] == ["evaluate"]


def test_a_phase_without_duration_leaves_no_span():
    recorder = SpanRecorder()
    recorder.enter("compute", 5)
    recorder.enter("forward", 5)
    assert recorder.spans == [] and recorder.phase == "forward"
