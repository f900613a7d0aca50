import hashlib
import json
from dataclasses import replace

import pytest

from harness.errors import InputError
from sim.workload import Workload, WorkloadSpec, build_workload
from tests.factory import make_plan

SPEC = WorkloadSpec(
    documents=5,
    document_tokens=40,
    question_tokens=8,
    output_tokens=3,
    passes=("fwd", "fwd", "rev"),
    warmup_documents=2,
    seed=7,
    vocab=(100, 5000),
)


def measured(spec: WorkloadSpec) -> Workload:
    return tuple(r for r in build_workload(spec) if r.phase == "measure")


def _token_digest(workload: Workload) -> str:
    prompts = [[*r.key, *r.prompt] for r in workload]
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def test_requests_come_warmup_first_then_each_pass_in_its_order():
    assert [r.key for r in build_workload(SPEC)] == [
        *(("warmup", d) for d in (0, 1)),
        *(("pass1-cold", d) for d in (0, 1, 2, 3, 4)),
        *(("pass2-replay", d) for d in (0, 1, 2, 3, 4)),
        *(("pass3-reverse", d) for d in (4, 3, 2, 1, 0)),
    ]


def test_measured_requests_are_all_but_the_warmup():
    workload = build_workload(SPEC)
    assert measured(SPEC) == workload[2:]
    assert [r.phase for r in workload[:2]] == ["warmup", "warmup"]


def test_every_prompt_has_the_shape_asked_for():
    requests = build_workload(SPEC)
    assert len(requests) == 17  # 2 warm-up + 3 passes of 5
    assert {len(r.prompt) for r in requests} == {48}  # 40 + 8
    assert {(r.doc_tokens, r.output_tokens) for r in requests} == {(40, 3)}


def test_every_token_id_lies_in_the_vocabulary_range():
    ids = {token for r in build_workload(SPEC) for token in r.prompt}
    assert min(ids) >= 100
    assert max(ids) < 5000


def test_a_document_is_the_same_in_every_pass():
    documents = {}
    for request in measured(SPEC):
        documents.setdefault(request.doc, set()).add(request.prompt[:40])
    assert {doc: len(texts) for doc, texts in documents.items()} == dict.fromkeys(range(5), 1)


def test_no_two_documents_share_their_first_token_so_none_shares_a_first_block():
    firsts = {(r.phase, r.doc): r.prompt[0] for r in build_workload(SPEC)}
    assert len(firsts) == 7
    assert len(set(firsts.values())) == 7


def test_every_request_asks_its_own_question():
    questions = [r.prompt[40:] for r in build_workload(SPEC)]
    assert len(set(questions)) == 17


def test_warmup_documents_share_no_prefix_with_a_measured_one():
    workload = build_workload(SPEC)
    firsts = {r.prompt[:1] for r in measured(SPEC)}
    assert len(firsts) == 5
    assert firsts.isdisjoint(r.prompt[:1] for r in workload if r.phase == "warmup")


def test_measured_documents_do_not_depend_on_how_many_passes_or_which_orders():
    one_pass = build_workload(replace(SPEC, passes=("fwd",)))
    assert one_pass == build_workload(SPEC)[:7]


def test_the_same_spec_gives_the_same_bytes_on_every_machine_and_version():
    # Pinned from the first build: a change here makes older runs incomparable (CHANGELOG).
    assert (
        _token_digest(build_workload(SPEC))
        == "0ceca78995699d855e45851377f5a43298e1f8c3d77544eb9a0726f976cb7aeb"
    )


def test_equal_token_ids_of_documents_are_one_object_so_a_token_costs_a_reference():
    spec = replace(SPEC, document_tokens=4000, vocab=(100_000, 100_050))
    documents = [r.prompt[1 : r.doc_tokens] for r in build_workload(spec)]
    assert len({id(token) for document in documents for token in document}) == 50


def test_another_seed_gives_other_documents():
    other = measured(replace(SPEC, seed=8))
    assert {r.prompt[:40] for r in other}.isdisjoint(r.prompt[:40] for r in measured(SPEC))


def test_as_many_first_tokens_as_documents_are_enough():
    firsts = {r.prompt[0] for r in build_workload(replace(SPEC, vocab=(10, 17)))}
    assert firsts == set(range(10, 17))


def _prompts_of(spec: WorkloadSpec, doc: int) -> list[tuple[int, ...]]:
    """The measured prompts of one document, in the order they are sent."""
    return [r.prompt for r in measured(spec) if r.doc == doc]


def test_an_appended_question_continues_the_whole_prompt_before_it():
    chat = replace(SPEC, questions="appended")
    first, second, third = _prompts_of(chat, doc=3)
    assert [len(first), len(second), len(third)] == [48, 56, 64]  # 40 + 8, and 8 more each pass
    assert (second[:48], third[:56]) == (first, second)
    assert first == _prompts_of(SPEC, doc=3)[0]


def test_earlier_turns_count_to_the_document():
    requests = build_workload(replace(SPEC, questions="appended"))
    assert [r.doc_tokens for r in requests if r.doc == 1] == [40, 40, 48, 56]  # warm-up first


def test_a_repeated_question_brings_the_whole_prompt_back():
    spec = replace(SPEC, questions="repeated")
    first, second, third = _prompts_of(spec, doc=2)
    assert first == second == third == _prompts_of(SPEC, doc=2)[0]
    assert len({r.prompt for r in build_workload(spec)}) == 7  # 5 documents, 2 warm-up


def test_each_document_is_a_step_longer_than_the_one_before():
    requests = build_workload(replace(SPEC, document_step_tokens=7))
    assert [r.doc_tokens for r in requests[:7]] == [40, 40, 40, 47, 54, 61, 68]
    assert all(len(r.prompt) == r.doc_tokens + 8 for r in requests)


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        ({}, 48),
        ({"document_step_tokens": 7}, 76),  # 40 + 4 * 7 + 8
        ({"questions": "repeated"}, 48),
        ({"questions": "appended"}, 64),  # 40 + 3 * 8
        ({"questions": "appended", "document_step_tokens": 7}, 92),  # 40 + 28 + 24
    ],
)
def test_the_longest_prompt_is_known_without_building_it(change, tokens):
    spec = replace(SPEC, **change)
    assert spec.longest_prompt_tokens == tokens
    assert max(len(r.prompt) for r in build_workload(spec)) == tokens


@pytest.mark.parametrize(
    ("line", "message"),
    [  # documents of 512, two of them, questions of 8, two passes, outputs of 2
        ("document_step_tokens = 30", "max_model_len is 544, but prompt and output are 552"),
        ("document_step_tokens = -1", "document_step_tokens: .*greater than or equal to 0"),
        ('questions = "old"', "questions: .*'new', 'appended' or 'repeated', got 'old'"),
    ],
)
def test_a_plan_is_held_to_its_longest_prompt_and_known_questions(line, message):
    with pytest.raises(InputError, match=message):
        make_plan(seed=f"seed = 1\n{line}")


def test_a_plan_without_the_newer_fields_asks_what_it_asked_before():
    assert make_plan().workload.spec() == WorkloadSpec(
        documents=2, document_tokens=512, question_tokens=8, output_tokens=2,
        passes=("fwd", "fwd"), warmup_documents=1, seed=1, vocab=(64, 448),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": 0}, "documents is 0"),
        ({"document_tokens": 0}, "document_tokens is 0"),
        ({"question_tokens": 0}, "question_tokens is 0"),
        ({"output_tokens": 0}, "output_tokens is 0"),
        ({"documents": -3}, "documents is -3"),
        ({"warmup_documents": -1}, "warmup_documents is -1"),
        ({"document_step_tokens": -1}, "document_step_tokens is -1"),
        ({"questions": "old"}, "questions is 'old'; known: new, appended, repeated"),
        ({"passes": ()}, r"passes are \[\]"),
        ({"passes": ("fwd", "sideways")}, "sideways"),
        ({"vocab": (10, 16)}, "7 documents each need a first token"),
        ({"vocab": (50, 50)}, "too few token ids"),
        ({"vocab": (-5, 100)}, "too few token ids"),
    ],
)
def test_a_spec_that_cannot_be_built_is_refused_and_names_its_value(change, message):
    with pytest.raises(ValueError, match=message):
        build_workload(replace(SPEC, **change))
