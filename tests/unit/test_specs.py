import time

import pytest

from npu_embed.errors import BundleError
from npu_embed.manifest import Manifest
from npu_embed.specs import GemmSpec, GemmStream, Specs, check_words, parse_specs

HEAD = (
    "version 1\nxclbin gemm kernels/gemm.xclbin MLIR_AIE\nxclbin mha kernels/mha.xclbin MLIR_AIE\n"
)
GEMM = "gemm qkv ctx=gemm insts=q1 M=64 K=32 N=96 lda=32 c_stride=96 a_elems=2048 c_elems=6144\n"
CHUNK2 = "gemm_chunks qkv 2 insts=q2 a_elems=4096 c_elems=12288\n"
CHUNK3 = "gemm_chunks qkv 3 insts=q3 a_elems=6144 c_elems=18432\n"
ROWS16 = "gemm_rows qkv 16 insts=r16 a_elems=512 c_elems=1536\n"
ROWS96 = "gemm_rows qkv 96 insts=r96 a_elems=3072 c_elems=9216\n"
MHA = "q_elems=9 k_elems=8 v_elems=7 o_elems=6 kv_words=10,20 win_words=11,21\n"
MHA128 = f"mha 128 ctx=mha insts=m128 {MHA}"
FULL = GEMM + CHUNK2 + CHUNK3 + MHA128


def specs(text: str) -> Specs:
    return parse_specs(Manifest.parse(HEAD + text))


def gemm(text: str) -> GemmSpec:
    return specs(text).gemms["qkv"]


def test_a_gemm_gathers_the_streams_of_its_chunks() -> None:
    spec = gemm(FULL)
    assert (spec.ctx, spec.line) == ("gemm", 4)
    assert (spec.M, spec.K, spec.N, spec.lda, spec.c_stride, spec.n_out) == (64, 32, 96, 32, 96, 96)
    assert spec.streams == (
        GemmStream("qkv", 64, "q1", 2048, 6144, 4),
        GemmStream("qkv_x2", 128, "q2", 4096, 12288, 5),
        GemmStream("qkv_x3", 192, "q3", 6144, 18432, 6),
    )


def test_streams_of_rows_between_chunks_stand_among_them_by_their_rows() -> None:
    spec = gemm(GEMM + CHUNK2 + CHUNK3 + ROWS16 + ROWS96 + MHA128)
    assert [(s.kernel_id, s.rows, s.insts, s.line) for s in spec.streams] == [
        ("qkv_r16", 16, "r16", 7),
        ("qkv", 64, "q1", 4),
        ("qkv_r96", 96, "r96", 8),
        ("qkv_x2", 128, "q2", 5),
        ("qkv_x3", 192, "q3", 6),
    ]
    assert (spec.streams[0].a_elems, spec.streams[0].c_elems) == (512, 1536)
    assert spec.max_rows == 192
    assert spec.stream_of("r96").rows == 96


def test_rows_take_the_shortest_stream_that_holds_them() -> None:
    whole, finer = gemm(FULL), gemm(GEMM + CHUNK2 + ROWS16 + ROWS96)
    assert whole.max_rows == 192
    found = [whole.stream_for(rows).rows for rows in (1, 64, 65, 128, 129, 192)]
    assert found == [64, 64, 128, 128, 192, 192]
    found = [finer.stream_for(rows).rows for rows in (1, 16, 17, 64, 65, 96, 97, 128)]
    assert found == [16, 16, 64, 64, 96, 96, 128, 128]


@pytest.mark.parametrize("rows", [-1, 0, 193])
def test_rows_no_stream_holds_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"gemm qkv: {rows} rows, wanted 1 to 192"):
        gemm(FULL).stream_for(rows)


def test_mha_buckets_are_sorted_and_the_shortest_that_holds_a_text_is_found() -> None:
    found = specs(f"mha 256 ctx=mha insts=m256 {MHA}" + MHA128)
    assert [mha.rows for mha in found.mhas] == [128, 256]
    short = found.mhas[0]
    assert (short.kernel_id, short.ctx, short.insts) == ("mha_128", "mha", "m128")
    assert (short.q_elems, short.k_elems, short.v_elems, short.o_elems) == (9, 8, 7, 6)
    assert (short.kv_words, short.win_words, short.line) == ((10, 20), (11, 21), 5)
    buckets = [found.mha_for(rows) for rows in (1, 128, 129, 256, 257)]
    assert [b.rows if b else None for b in buckets] == [128, 128, 256, 256, None]


def test_named_buckets_are_kept_apart() -> None:
    wide = f"mha 128 name=wide ctx=mha insts=w128 {MHA}"
    found = specs(f"mha 256 name=wide ctx=mha insts=w256 {MHA}" + MHA128 + wide)
    assert [(m.name, m.rows, m.kernel_id) for m in found.all_mhas] == [
        ("wide", 128, "mha.wide_128"),
        ("wide", 256, "mha.wide_256"),
        ("mha", 128, "mha_128"),
    ]
    assert [m.insts for m in found.mhas] == ["m128"]
    for rows, name, insts in (
        (129, None, None),
        (129, "wide", "w256"),
        (1, "wide", "w128"),
        (1, "mha", "m128"),
        (1, "other", None),
    ):
        bucket = found.mha_for(rows, name)
        assert (bucket.insts if bucket else None) == insts


def test_the_only_name_needs_no_naming() -> None:
    wide = f"mha 128 name=wide ctx=mha insts=w128 {MHA}"
    assert [m.insts for m in specs(wide).mhas] == ["w128"]
    assert specs(wide + wide.replace("wide", "narrow")).mhas == ()
    assert specs(MHA128.replace("128 ctx", "128 name=mha ctx")).mhas == specs(MHA128).mhas


def test_a_bundle_may_have_no_kernels_of_a_kind() -> None:
    assert specs("") == Specs({}, {})


def test_unknown_tags_and_extra_keys_are_skipped() -> None:
    assert gemm("future x\n" + GEMM.replace("\n", " tile_n=64\n") + "other\n").N == 96


def test_a_paired_gemm_may_leave_fewer_columns_than_it_multiplies() -> None:
    silent = gemm(
        GEMM.replace("c_stride=96", "c_stride=48").replace("c_elems=6144", "c_elems=3072")
    )
    assert (silent.N, silent.c_stride, silent.n_out) == (96, 48, 48)
    stated = gemm(GEMM.replace("\n", " n_out=48\n"))
    assert (stated.c_stride, stated.n_out) == (96, 48)


def test_the_last_row_of_a_view_need_not_be_a_whole_stride() -> None:
    wide = GEMM.replace("lda=32", "lda=100").replace("c_stride=96", "c_stride=128")
    least = wide.replace("a_elems=2048", f"a_elems={63 * 100 + 32}")
    least = least.replace("c_elems=6144", f"c_elems={63 * 128 + 96}")
    assert gemm(least).streams[0].a_elems == 6332


@pytest.mark.parametrize("key", ["M", "K", "N", "lda", "c_stride", "a_elems", "c_elems"])
@pytest.mark.parametrize("value", ["0", "-1", "", "x", "1.5", "4294967296", "99999999999999999999"])
def test_every_gemm_number_is_bounded(key: str, value: str) -> None:
    with pytest.raises(BundleError, match=rf"manifest\.txt:4: gemm {key} is .* an integer 1 to"):
        specs(GEMM.replace("\n", f" {key}={value}\n"))


@pytest.mark.parametrize("key", ["q_elems", "k_elems", "v_elems", "o_elems"])
@pytest.mark.parametrize("value", ["0", "-1", "", "4294967296"])
def test_every_mha_number_is_bounded(key: str, value: str) -> None:
    with pytest.raises(BundleError, match=rf"manifest\.txt:4: mha {key} is .* an integer 1 to"):
        specs(MHA128.replace("\n", f" {key}={value}\n"))


@pytest.mark.parametrize(
    "key", ["ctx", "insts", "M", "K", "N", "lda", "c_stride", "a_elems", "c_elems"]
)
def test_a_missing_gemm_key_is_named(key: str) -> None:
    with pytest.raises(BundleError, match=rf"manifest\.txt:4: gemm has no {key}=, wanted it"):
        specs(GEMM.replace(f" {key}=", " other="))


@pytest.mark.parametrize(
    "key", ["ctx", "insts", "q_elems", "k_elems", "v_elems", "o_elems", "kv_words", "win_words"]
)
def test_a_missing_mha_key_is_named(key: str) -> None:
    with pytest.raises(BundleError, match=rf"manifest\.txt:4: mha has no {key}=, wanted it"):
        specs(MHA128.replace(f" {key}=", " other="))


@pytest.mark.parametrize("key", ["insts", "a_elems", "c_elems"])
@pytest.mark.parametrize("record", [CHUNK2, ROWS16])
def test_a_missing_key_of_a_further_stream_is_named(record: str, key: str) -> None:
    tag = record.split()[0]
    with pytest.raises(BundleError, match=rf"manifest\.txt:5: {tag} has no {key}=, wanted"):
        specs(GEMM + record.replace(f" {key}=", " other="))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gemm\n", ":4: gemm has 0 fields, wanted KEY"),
        (GEMM + CHUNK3, ":5: gemm_chunks qkv 3 follows chunk 1, wanted chunk 2"),
        (GEMM + CHUNK2 + CHUNK2, ":6: gemm_chunks qkv 2 follows chunk 2, wanted chunk 3"),
        (GEMM + CHUNK2.replace("v 2", "v 1"), ":5: gemm_chunks qkv 1 follows chunk 1, wanted"),
        (GEMM + CHUNK2.replace("v 2", "v two"), ":5: gemm_chunks KEY N is 'two', wanted an int"),
        (GEMM + "gemm_chunks qkv\n", ":5: gemm_chunks has 1 fields, wanted KEY N"),
        (CHUNK2, ":4: gemm_chunks qkv, wanted it right after gemm qkv"),
        (GEMM + "future\n" + CHUNK2, ":6: gemm_chunks qkv, wanted it right after gemm qkv"),
        (GEMM + MHA128 + CHUNK2, ":6: gemm_chunks qkv, wanted it right after gemm qkv"),
        (GEMM + GEMM.replace("qkv", "o") + CHUNK2, ":6: gemm_chunks qkv, wanted it right after"),
        (
            GEMM + CHUNK2.replace("\n", " ctx=mha\n"),
            ":5: gemm_chunks qkv 2 ctx is mha, wanted gemm",
        ),
        (GEMM + ROWS16.replace(" 16", " 0"), ":5: gemm_rows KEY ROWS is '0', wanted an integer 1"),
        (GEMM + ROWS16.replace(" 16", " x"), ":5: gemm_rows KEY ROWS is 'x', wanted an integer 1"),
        (GEMM + "gemm_rows qkv\n", ":5: gemm_rows has 1 fields, wanted KEY ROWS"),
        (GEMM + "gemm_rows\n", ":5: gemm_rows has 0 fields, wanted KEY ROWS"),
        (ROWS16, ":4: gemm_rows qkv, wanted it right after gemm qkv"),
        (GEMM + MHA128 + ROWS16, ":6: gemm_rows qkv, wanted it right after gemm qkv"),
        (GEMM + ROWS16.replace("qkv", "o"), ":5: gemm_rows o, wanted it right after gemm o"),
        (
            GEMM + ROWS16.replace(" 16", " 64"),
            ":5: gemm_rows qkv 64 is 1 chunks of 64 rows, wanted rows between chunks",
        ),
        (
            GEMM + ROWS96,
            ":5: gemm_rows qkv 96, wanted fewer rows than the 64 of all its chunks",
        ),
        (
            GEMM + CHUNK2 + ROWS96 + ROWS16,
            ":7: gemm_rows qkv 16 follows 96 rows, wanted more than those",
        ),
        (GEMM + ROWS16 + ROWS16, ":6: gemm_rows qkv 16 follows 16 rows, wanted more than those"),
        (GEMM + ROWS16 + CHUNK2, ":6: gemm_chunks qkv 2, wanted it before gemm_rows qkv"),
        (
            GEMM + ROWS16.replace("\n", " ctx=mha\n"),
            ":5: gemm_rows qkv 16 ctx is mha, wanted gemm as its gemm has",
        ),
        (
            GEMM + ROWS16.replace("=r16", "=q1"),
            ":5: gemm_rows qkv 16 insts is q1, which is of 64 rows, wanted a stream of its own",
        ),
        (GEMM + ROWS16.replace("=r16", "="), ":5: gemm_rows insts is empty, wanted a path"),
        (
            GEMM + ROWS16.replace("=512", "=511"),
            ":5: gemm_rows qkv a_elems is 511, wanted at least 512 for 16 rows",
        ),
        (
            GEMM + ROWS16.replace("=1536", "=1535"),
            ":5: gemm_rows qkv c_elems is 1535, wanted at least 1536 for 16 rows",
        ),
        (
            GEMM + ROWS16 + GEMM.replace("qkv", "qkv_r16"),
            ":6: a kernel named qkv_r16, wanted another name than that of line 5",
        ),
        (GEMM + GEMM, ":5: gemm qkv for the second time (first on line 4), wanted it once"),
        (MHA128 + MHA128, ":5: mha 128 for the second time (first on line 4), wanted one a bucket"),
        (
            2 * MHA128.replace("128 ctx", "128 name=wide ctx"),
            ":5: mha 128 name=wide for the second time (first on line 4), wanted one a bucket",
        ),
        (MHA128.replace("128 ctx", "128 name= ctx"), ":4: mha 128 name is empty, wanted a name"),
        (
            GEMM.replace("qkv", "mha.wide_128") + MHA128.replace("128 ctx", "128 name=wide ctx"),
            ":5: a kernel named mha.wide_128, wanted another name than that of line 4",
        ),
        (GEMM.replace("ctx=gemm", "ctx=x"), ":4: gemm ctx is 'x', wanted the key of an xclbin (ge"),
        (MHA128.replace("ctx=mha", "ctx="), ":4: mha ctx is '', wanted the key of an xclbin (gemm"),
        (GEMM.replace("insts=q1", "insts="), ":4: gemm insts is empty, wanted a path"),
        (GEMM.replace("lda=32", "lda=31"), ":4: gemm qkv lda is 31, wanted at least K 32"),
        (GEMM.replace("=2048", "=2047"), ":4: gemm qkv a_elems is 2047, wanted at least 2048 for"),
        (GEMM.replace("=6144", "=6143"), ":4: gemm qkv c_elems is 6143, wanted at least 6144 for"),
        (GEMM + CHUNK2.replace("=4096", "=4095"), ":5: gemm_chunks qkv a_elems is 4095, wanted at"),
        (
            GEMM + CHUNK2.replace("=12288", "=1"),
            ":5: gemm_chunks qkv c_elems is 1, wanted at least",
        ),
        (GEMM.replace("\n", " n_out=97\n"), ":4: gemm qkv n_out is 97, wanted at most N 96 and at"),
        (
            GEMM.replace("c_stride=96", "c_stride=95 n_out=96"),
            ":4: gemm qkv n_out is 96, wanted at most N 96 and at most c_stride 95",
        ),
        ("mha x\n", ":4: mha ROWS is 'x', wanted an integer 1 to"),
        ("mha 0\n", ":4: mha ROWS is '0', wanted an integer 1 to"),
        (MHA128.replace("=10,20", "="), ":4: mha kv_words is empty, wanted word indices"),
        (MHA128.replace("=11,21", "=,"), ":4: mha win_words is empty, wanted word indices"),
        (MHA128.replace("=10,20", "=-1"), ":4: mha kv_words is '-1', wanted an integer 0 to"),
        (MHA128.replace("=10,20", "=1,x"), ":4: mha kv_words is 'x', wanted an integer 0 to"),
        (MHA128.replace("=10,20", "=1073741824"), ":4: mha kv_words is '1073741824', wanted"),
        (MHA128.replace("=11,21", "=20"), ":4: mha 128 has word 20 in kv_words and in win_words"),
        (
            GEMM + CHUNK2 + GEMM.replace("qkv", "qkv_x2"),
            ":6: a kernel named qkv_x2, wanted another name than that of line 5",
        ),
        (
            GEMM.replace("qkv", "mha_128") + MHA128,
            ":5: a kernel named mha_128, wanted another name than that of line 4",
        ),
    ],
)
def test_a_wrong_record_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(BundleError) as info:
        specs(text)
    assert str(info.value).startswith(f"manifest.txt{message}")
    assert str(info.value).endswith("re-export the bundle.")


@pytest.mark.parametrize("record", [CHUNK2, ROWS16])
def test_a_further_stream_may_repeat_the_xclbin_of_its_gemm(record: str) -> None:
    assert len(gemm(GEMM + record.replace("\n", " ctx=gemm\n")).streams) == 2


def test_the_longest_rows_between_chunks_are_below_all_of_them() -> None:
    almost = "gemm_rows qkv 63 insts=r63 a_elems=2016 c_elems=6048\n"
    assert [s.rows for s in gemm(GEMM + almost).streams] == [63, 64]


@pytest.mark.parametrize(
    ("words", "message"), [(20, "kv_words has word 20"), (21, "win_words has word 21")]
)
def test_a_word_past_the_stream_is_refused(words: int, message: str) -> None:
    (mha,) = specs(MHA128).mhas
    with pytest.raises(BundleError, match=rf"manifest\.txt:4: mha 128 {message}, wanted less than"):
        check_words(mha, words)


def test_words_inside_the_stream_are_accepted() -> None:
    check_words(specs(MHA128).mhas[0], 22)


def test_one_stream_is_not_of_two_numbers_of_chunks() -> None:
    with pytest.raises(BundleError, match=r"manifest.txt:6: gemm_chunks qkv 3 insts is q2"):
        specs(GEMM + CHUNK2 + CHUNK3.replace("insts=q3", "insts=q2"))


def test_many_chunks_are_read_in_the_time_of_their_lines() -> None:
    count = 20_000
    lines = [
        f"gemm_chunks qkv {n} insts=q{n} a_elems={n * 2048} c_elems={n * 6144}\n"
        for n in range(2, count + 1)
    ]
    begun = time.perf_counter()
    assert len(gemm(GEMM + "".join(lines)).streams) == count
    assert time.perf_counter() - begun < 3
