"""Tiny tokenizers of each kind: of bytes, of words, and those that mark where words begin."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from zero3d.data.tokenizers import HfTokenizer

CORPUS = [
    "The capital of Italy is Rome . 2+2= 4 one two three aaa bbb hello there friend émile ﬁne is is is a a a"
] * 20
SPECIAL = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "<tool>", "<system>", "<end>"]


def wrapped(inner, **options):
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"} | options
    )
    return HfTokenizer(made, "tokenizer", "fingerprint")


def of_bytes(trim=False):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, special_tokens=SPECIAL)
    )
    return wrapped(inner)


def of_words():
    inner = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate([*SPECIAL, "a", "is", "Rome", "one"])}, "<unk>")
    )
    inner.add_special_tokens(SPECIAL)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return wrapped(inner)


def of_marks(kind="bpe", **options):
    """Tokens mark where words begin, as SentencePiece does."""
    inner = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(**options), decoders.Metaspace(**options)
    if kind == "prepend":  # as Llama 2
        inner.pre_tokenizer = None
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = (
        trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>")
        if kind == "unigram"
        else trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL)
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return wrapped(inner)
