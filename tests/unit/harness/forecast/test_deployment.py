import json

import pytest

from harness.errors import InputError
from harness.forecast.deployment import describe
from harness.forecast.deployment_file import Deployment, read_deployment

# 2 * 32 layers * 8 heads * 128 * 2 bytes = 131,072 a token: 32 MiB a chunk of 256.
LLAMA_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
LATENT = {
    "model_type": "deepseek_v2",
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "kv_lora_rank": 448,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path):
    def write(config=LLAMA_8B):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


@pytest.fixture
def told(model):
    """20 documents of 5,000 tokens, 19 chunks each, walked forward twice; a GPU of 60,000 tokens."""

    def tell(config=LLAMA_8B, **changed):
        fields = {
            "model": model(config), "gpu_kv_tokens": 60_000, "documents": 20,
            "document_tokens": 5_000,
        }  # fmt: skip
        return describe(Deployment.model_validate(fields | changed))

    return tell


def test_sizes_are_those_of_the_model_and_of_lmcaches_binary_gib(told):
    content = told(host_gib=10.0)
    assert content["bytes_per_token"] == 131_072
    assert content["gpu"] == {"tokens": 60_000, "gib_per_worker": 60_000 * 131_072 / 2**30}
    assert content["host"]["chunks"] == 320  # 10 GiB / 32 MiB
    assert content["host"]["tokens"] == 81_920


def test_a_host_tier_below_the_documents_gets_no_hit_and_the_size_that_would(told):
    # 20 * 19 = 380 chunks stay below 0.8 of 476 (0.798), not of 475: 476 * 32 MiB = 14.875 GiB.
    content = told(host_gib=10.0)
    assert content["predicted"]["pass2-replay"] == {
        "computed": 100_400, "gpu_hit": 0, "host_loaded": 0,
    }  # fmt: skip
    assert content["enough"]["host_chunks"] == 476
    assert content["enough"]["host_gib"] == 14.875
    # Each prompt of 5,020 loads 19 * 256 = 4,864 tokens and computes 156.
    assert content["predicted_with_enough_host"]["pass2-replay"] == {
        "computed": 3_120, "gpu_hit": 0, "host_loaded": 97_280,
    }  # fmt: skip
    assert content["inexact_because"] == []


def test_the_paragraph_holds_the_numbers_the_cause_and_the_size_that_works(told):
    text = told(host_gib=10.0)["paragraph"]
    for part in (
        "20 documents of 5,000 tokens are 100,000 tokens of KV",
        "the GPU tier holds 60,000 (7.3 GiB)",
        "the host tier 81,920 (10 GiB per server, --l1-size-gb)",
        "No gain, 0 host hits: the host tier keeps at most 65,536 tokens and evicts from 80% on",
        "with 14.9 GiB (per server, --l1-size-gb) 97,280 tokens are loaded and 3,120 computed",
    ):
        assert part in text
    assert "\n" not in text


def test_the_size_that_is_said_to_work_works(told):
    text = told(host_gib=14.9)["paragraph"]
    assert "The host tier keeps every document." in text
    assert told(host_gib=14.875)["predicted"] == told(host_gib=10.0)["predicted_with_enough_host"]


def test_enough_gpu_tokens_find_every_document_without_a_host_and_a_block_less_does_not(told):
    # 312 whole blocks of 16 a document. A request fills (5,035 // 16) - 312 = 2 more with its
    # question, and 19 requests lie between a document's two; one block without a hash goes from
    # request to request; one is vLLM's null block.
    content = told(host="none")
    enough = content["enough"]["gpu_tokens"]
    assert enough == (1 + 20 * 312 + 19 * 2 + 1) * 16
    full = {"computed": 20 * 28, "gpu_hit": 20 * 4_992, "host_loaded": 0}
    assert told(host="none", gpu_kv_tokens=enough)["predicted"]["pass2-replay"] == full
    assert told(host="none", gpu_kv_tokens=enough - 16)["predicted"]["pass2-replay"] != full
    assert "There is no host tier" in content["paragraph"]


LONG_QUESTIONS = {"question_tokens": 5_000, "passes": ["fwd"] * 4, "gpu_kv_tokens": 20_000}


@pytest.mark.parametrize(
    ("engine", "aging_blocks", "scratch"), [("0.32.0", 313, 1), ("0.23.0", 314, 0)]
)
def test_long_questions_do_not_pile_up_in_what_is_enough(told, engine, aging_blocks, scratch):
    # 10,000 + 16 - 1 tokens: 626 blocks, 625 of them full; 313 are a question's and age, one is
    # without a hash: up to 0.23 it ages, too. Four passes kept 80 questions would be twice that.
    enough = told(host="none", engine=engine, **LONG_QUESTIONS)["enough"]["gpu_tokens"]
    assert enough == (1 + 20 * 312 + 19 * aging_blocks + scratch) * 16


@pytest.mark.parametrize("policy", ["LRU", "noop"])
@pytest.mark.parametrize("changed", [{}, LONG_QUESTIONS], ids=["short", "long"])
def test_enough_host_chunks_serve_every_replay_and_one_chunk_less_does_not(told, policy, changed):
    fields = {"policy": policy, "host_gib": 1.0, **changed}
    content = told(**fields)
    chunks = content["enough"]["host_chunks"]
    assert content["enough"]["host_is_least"] is True

    def loaded(n):
        passes = told(**fields | {"host_gib": n / 32})["predicted"]  # 32 MiB a chunk
        return sum(tokens["host_loaded"] for tokens in passes.values())

    assert loaded(chunks) == loaded(100_000)
    assert loaded(chunks - 1) < loaded(chunks)


def test_without_eviction_enough_is_the_first_walks_chunks(told):
    # 20 prompts of 19 whole chunks: whatever later questions would add finds no room, and need not.
    assert told(host_gib=1.0, policy="noop")["enough"]["host_chunks"] == 20 * 19
    # 10,000 tokens are 39 chunks, 20 of the question alone; a prompt is stored whole or not at all.
    long = told(host_gib=1.0, policy="noop", max_num_batched_tokens=16_384, **LONG_QUESTIONS)
    assert long["enough"]["host_chunks"] == 20 * 39
    # In steps of 8,192 tokens, of 32 chunks and 7, the last prompt need only keep the first step's.
    long = told(host_gib=1.0, policy="noop", **LONG_QUESTIONS)
    assert long["enough"]["host_chunks"] == 19 * 39 + 32


def test_a_description_too_large_to_look_for_the_least_host_tier_says_so(told):
    # 2,000 prompts of 125 chunks of 16: 250,000 at 40 sizes are beyond 10 million.
    content = told(
        documents=1_000, document_tokens=2_000, chunk_tokens=16, host_gib=100.0,
    )  # fmt: skip
    assert content["enough"]["host_is_least"] is False
    assert "Less host memory may do" in content["paragraph"]
    assert content["predicted_with_enough_host"]["pass2-replay"]["host_loaded"] > 0


# Chunks of 64 tokens take 64 * 65,536 bytes in fp8, 4 MiB. Three prompts of 25 chunks, 20 of them a
# document's: 26 chunks serve the way back from the host, 51, which is 0.2 GiB, do not: they evict
# at other moments. 3 * 20 + 6 * 5 = 90 chunks stay below 0.8 of 113, which take 0.44 GiB.
FRAGILE = {
    "documents": 3, "document_tokens": 1_333, "question_tokens": 300, "output_tokens": 1,
    "passes": ["rev", "fwd"], "gpu_kv_tokens": 4_752, "chunk_tokens": 64, "kv_dtype": "fp8",
    "engine": "0.23.0",
}  # fmt: skip


def test_a_size_is_advised_that_works_although_a_smaller_one_between_does_not(told):
    content = told(**FRAGILE)
    enough = content["enough"]
    assert enough["host_gib"] == 26 * 4 / 1024
    assert told(**FRAGILE, host_gib=0.2)["predicted"] != content["predicted_with_enough_host"]
    assert enough["advised_gib"] == 0.5
    assert told(**FRAGILE, host_gib=0.5)["predicted"] == content["predicted_with_enough_host"]
    assert "What works: with 0.5 GiB" in content["paragraph"]
    assert "About 0.102 GiB would do, but some sizes between" in content["paragraph"]
    assert "with a chunk or a block less" not in content["paragraph"]


def test_a_host_that_never_evicts_keeps_all_it_holds(told):
    # 320 chunks of 256 tokens, whatever the watermark.
    text = told(host_gib=10.0, policy="noop")["paragraph"]
    assert "keeps at most 81,920 tokens and evicts nothing" in text


def test_one_document_is_spoken_of_as_one(told):
    assert "1 document of 5,000 tokens is 5,000 tokens" in told(documents=1)["paragraph"]


def test_vllms_own_tier_keeps_single_blocks_unless_said(told):
    # 131,072 bytes a token: 2 MiB a block of 16, 512 in a GiB; 32 MiB in chunks of 256.
    assert told(host="native", host_gib=1.0)["host"]["chunks"] == 512
    assert told(host="native", host_gib=1.0, block_size=32)["host"]["chunks"] == 256
    assert told(host="native", host_gib=2.0, chunk_tokens=256)["host"]["chunks"] == 64


def test_bytes_beyond_whole_chunks_count_for_the_watermark(told):
    # 475 chunks of 32 MiB: 380 documents' chunks are at 0.8 of them and evicted, but below 0.8 of
    # 475.5 chunks.
    assert told(host_gib=475 / 32)["predicted"]["pass2-replay"]["host_loaded"] == 0
    assert told(host_gib=475.5 / 32)["predicted"]["pass2-replay"]["host_loaded"] == 97_280


def test_an_engine_newer_than_any_compared_is_said(told):
    content = told(host_gib=10.0, engine="0.40.0")
    assert content["inexact_because"] == [
        "vLLM 0.40.0: rules of 0.33 assumed; the newest compared is 0.33"
    ]
    assert "rules of 0.33 assumed" in content["paragraph"]
    # Whatever the rules, a replay finds at most the 312 whole blocks of its document.
    assert content["computed_bounds"] == {
        "pass1-cold": [100_400, 100_400], "pass2-replay": [20 * (5_020 - 4_992), 100_400],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"host_gib": 7.0}, "no larger than the GPU tier"),  # 57,344 tokens
        ({"host_gib": 0.5}, "not even one prompt fits"),  # 16 chunks of 19
        ({"gpu_kv_tokens": 120_000, "host_gib": 20.0}, "the GPU tier finds every document"),
        ({"passes": ["fwd"], "host_gib": 20.0}, "asked once"),
        ({"document_tokens": 200, "gpu_kv_tokens": 2_000, "host_gib": 1.0}, "smaller chunks"),
        ({"host_gib": 10.0, "policy": "noop"}, "evicts nothing"),
        ({"host_gib": 14.0, "passes": ["fwd", "rev"]}, "Less than it could be"),
    ],
)
def test_each_reason_for_no_gain_is_named(told, changed, said):
    assert said in told(**changed)["paragraph"]


def test_documents_below_one_block_cannot_be_reused_and_are_not_called_found(told):
    content = told(document_tokens=10, question_tokens=6000)
    assert (
        "fewer tokens than a KV block (16), so nothing of it can be reused" in content["paragraph"]
    )


def test_lmcaches_size_is_per_worker_in_process_and_per_server_in_mp_mode(told):
    # 2 workers keep 4 heads each: 16 MiB a chunk and worker, 32 MiB a chunk and server.
    in_process = told(host="lmcache", host_gib=5.0, tensor_parallel=2)
    server = told(host="lmcache-mp", host_gib=5.0, tensor_parallel=2)
    assert in_process["host"]["chunks"] == 320
    assert server["host"]["chunks"] == 160
    assert in_process["gpu"]["gib_per_worker"] == 60_000 * 65_536 / 2**30
    assert "per worker, max_local_cpu_size" in in_process["paragraph"]
    assert "on each of 2 workers" in server["paragraph"]
    assert "tensor-parallel worker" in server["paragraph"]


@pytest.mark.parametrize("workers", [3, 64])  # vLLM divides the 32 attention heads, too
def test_workers_that_cannot_share_the_heads_are_refused(told, workers):
    with pytest.raises(InputError, match=f"cannot be shared by {workers} tensor-parallel ranks"):
        told(host_gib=1.0, tensor_parallel=workers)


def test_a_latent_is_kept_whole_by_every_worker_and_stored_once(told):
    # 8 layers * 512 * 2 bytes = 8,192 a token: 2 MiB a chunk, 512 in 1 GiB whatever the workers.
    content = told(LATENT, host_gib=1.0, tensor_parallel=4)
    assert content["host"]["chunks"] == 512
    assert content["gpu"]["gib_per_worker"] == 60_000 * 8_192 / 2**30
    assert any("MLA" in reason for reason in content["inexact_because"])


def test_prompts_of_several_prefill_steps_are_exact_where_no_tick_can_matter(told):
    # Ticks between steps of 8 chunks leave other chunks behind, but none that a replay still finds.
    content, in_one = told(host_gib=10.0, max_num_batched_tokens=2048), told(host_gib=10.0)
    assert content["predicted"] == in_one["predicted"]
    assert (content["inexact_because"], content["computed_bounds"]) == ([], None)


def test_a_prompt_too_large_for_one_store_is_kept_as_far_as_its_steps_fit(told):
    # Two documents of 20 chunks, a host tier of 19 that evicts from 16 on, steps of 5 chunks, and a
    # GPU that holds one prompt. Document 0 stores 15 chunks and loses its last 5, and each 5 of
    # document 1 find room for 4. Read in reverse, document 1 is a GPU hit (20 tokens computed), and
    # of document 0 15 chunks are loaded: 5,140 - 3,840 = 1,300 are computed. Stored in one step it
    # would not be kept at all, and 5,140 - 288 still in the GPU = 4,852 computed.
    content = told(
        documents=2, document_tokens=20 * 256, passes=("fwd", "rev"), host_gib=19 / 32,
        max_num_batched_tokens=5 * 256, gpu_kv_tokens=344 * 16,
    )  # fmt: skip
    assert content["predicted"]["pass2-reverse"]["computed"] == 20 + 1_300
    assert (content["inexact_because"], content["computed_bounds"]) == ([], None)
    in_one = told(
        documents=2, document_tokens=20 * 256, passes=("fwd", "rev"), host_gib=19 / 32,
        gpu_kv_tokens=344 * 16,
    )  # fmt: skip
    assert in_one["predicted"]["pass2-reverse"]["computed"] == 20 + 4_852


def test_prompts_of_several_prefill_steps_have_bounds_where_a_tick_may_matter(told):
    # Two documents of 12 chunks, a host tier of 10 that evicts a fifth from 8 on, steps of 4 chunks,
    # and a GPU that holds one prompt. Document 0 stores 8 chunks; a tick takes one: its last, the
    # 8th, at the end, or the 4th, before. Document 1's four at a time find room for 3. The replay
    # of document 0 loads 7 chunks, or 3: 3,092 - 1,792 = 1,300 computed, or 2,324; that of 1 none.
    content = told(
        documents=2, document_tokens=12 * 256, max_num_batched_tokens=4 * 256, host_gib=10 / 32,
        gpu_kv_tokens=196 * 16,
    )  # fmt: skip
    assert content["computed_bounds"] == {
        "pass1-cold": [6_184, 6_184], "pass2-replay": [1_300 + 3_092, 2_324 + 3_092],
    }  # fmt: skip
    assert content["predicted"]["pass2-replay"] == {
        "computed": 4_392, "gpu_hit": 0, "host_loaded": 1_792,
    }  # fmt: skip
    assert "several prefill steps of 1,024" in content["paragraph"]
    assert "At least 4,392 and at most 5,416 tokens of the replays" in content["paragraph"]


def test_more_contents_than_can_be_followed_leave_the_bounds_of_sizes(told, monkeypatch):
    # At most all 12 chunks of both documents are found, at least what the GPU finds: nothing.
    monkeypatch.setattr("sim.tiers.moments.MOST_WORK", 10)
    content = told(
        documents=2, document_tokens=12 * 256, max_num_batched_tokens=4 * 256, host_gib=10 / 32,
        gpu_kv_tokens=196 * 16,
    )  # fmt: skip
    assert content["computed_bounds"]["pass2-replay"] == [2 * 20, 6_184]


def test_a_hybrid_model_is_refused_with_what_each_group_keeps(told):
    kinds = ["sliding_attention", "full_attention"] * 16
    with pytest.raises(InputError, match=r"16 layers of full_attention: 65,536 bytes a token"):
        told(LLAMA_8B | {"layer_types": kinds, "sliding_window": 128})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gpu_kv_tokens": 4_000}, "249 of 250 GPU blocks"),
        ({"tensor_parallel": 3}, "32 attention heads cannot be shared by 3"),
        ({"model": "/no/such/model"}, "neither a path"),
        ({"engine": "new"}, "engine 'new'"),
        ({"host_gib": 1.0, "chunk_tokens": 100}, "whole blocks"),
        ({"host": "native", "host_gib": 0.25}, "cannot be predicted"),  # 8 chunks, 19 a prompt
    ],
)
def test_what_no_server_could_have_is_refused(told, changed, message):
    with pytest.raises(InputError, match=message):
        told(**changed)


def test_a_description_is_read_from_toml(tmp_path, model):
    file = tmp_path / "deployment.toml"
    file.write_text(
        f'model = "{model()}"\ngpu_kv_tokens = 60000\ndocuments = 20\ndocument_tokens = 5000\n'
        'passes = ["fwd", "rev"]\nhost_gib = 10.5\n'
    )
    deployment = read_deployment(file)
    assert deployment.passes == ("fwd", "rev")
    assert deployment.host_gib == 10.5


HUGE = """model = "m"
gpu_kv_tokens = 1
documents = 1
document_tokens = {}
question_tokens = {}
output_tokens = {}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = ", "not valid TOML"),
        ('model = "m"', "gpu_kv_tokens: Field required"),
        ('model = "m"\ngpu_kv_tokens = 0', "gpu_kv_tokens"),
        ('model = "m"\ngpu_kv_tokens = "60000"', "gpu_kv_tokens"),
        ('model = "m"\ngpu_kv_tokens = 1\ndocuments = 1\ndocument_tokens = 1\nhosts = 1', "hosts"),
        (
            'model = "m"\ngpu_kv_tokens = 1\ndocuments = 1000\ndocument_tokens = 100000',
            "2,000 prompts of 6,253 KV blocks; about 5,000,000 blocks",
        ),
        # 2**40 tokens are no list in memory before they are refused.
        (HUGE.format(2**40, 1, 1), "2 prompts of 68,719,476,737 KV blocks"),
        (HUGE.format(1, 2**40, 1), "2 prompts of 68,719,476,737 KV blocks"),
        (HUGE.format(1, 1, 2**40), "2 prompts of 68,719,476,737 KV blocks"),
        (HUGE.format(2**41, 1, 1), r"document_tokens: .*less than or equal to 1099511627776"),
    ],
)
def test_a_bad_description_is_refused_with_its_field(tmp_path, text, message):
    file = tmp_path / "deployment.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_deployment(file)


def test_a_description_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.toml: No such file"):
        read_deployment(tmp_path / "nothing.toml")


def test_a_hub_id_whose_shape_comes_with_kvcliff_needs_no_download(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    fields = {"model": "Qwen/Qwen3-8B", "gpu_kv_tokens": 60_000, "documents": 2,
              "document_tokens": 500}  # fmt: skip
    # 2 * 36 layers * 8 heads * 128 * 2 bytes
    assert describe(Deployment.model_validate(fields))["bytes_per_token"] == 147_456


def test_a_sliding_window_no_request_outgrows_is_answered_and_a_smaller_one_is_not(told):
    # 5,000 + 20 + 16 tokens; the host tier was not compared with such a model.
    window = LLAMA_8B | {"sliding_window": 5_036, "max_position_embeddings": 32_768}
    assert told(window, host="none")["inexact_because"] == []
    (reason,) = told(window, host_gib=1.0)["inexact_because"]
    assert "sliding window that no request outgrows" in reason
    with pytest.raises(InputError, match="every layer is sliding-window"):
        told(window | {"sliding_window": 5_035}, host="none")


def test_gpt_oss_without_a_dtype_is_told_apart_by_its_groups(told):
    gpt_oss = {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880, "sliding_window": 128,
    }  # fmt: skip
    with pytest.raises(InputError, match="12 layers of sliding_window: 24,576 bytes a token"):
        told(gpt_oss)
