//! Text from token ids: named cases from the field, then properties against naive whole decoding.

use proptest::collection::vec;
use proptest::prelude::*;
use pyvllm_core::detokenizer::{Detokenizer, Vocabulary};

/// Ids 0..=255 are the bytes; then "hi" (256), an added token (257) and two special ones (258, 259).
fn byte_level() -> Vocabulary {
    let named = ["hi", "<tool>", "<|im_end|>", "</s>"];
    let tokens = (0..=255u8).map(|byte| vec![byte]).chain(named.map(|token| token.as_bytes().to_vec()));
    Vocabulary::new(tokens, &[258, 259], &[], false)
}

const HI: u32 = 256;
const TOOL: u32 = 257;
const IM_END: u32 = 258;

/// Ids 0..=255 are byte tokens; then pieces, `▁` already a space, and the special tokens `<s>`, `</s>`.
fn byte_fallback() -> Vocabulary {
    let pieces = [" ", " leading", " x", " Hello", " world", "é", "<s>", "</s>", ""];
    let tokens = (0..=255u8).map(|byte| vec![byte]).chain(pieces.map(|piece| piece.as_bytes().to_vec()));
    let byte_ids: Vec<u32> = (0..256).collect();
    Vocabulary::new(tokens, &[262, 263], &byte_ids, true)
}

const SPACE: u32 = 256;
const LEADING: u32 = 257;
const X: u32 = 258;
const HELLO: u32 = 259;
const WORLD: u32 = 260;
const BOS: u32 = 262;

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// What each output token adds, and at last what `finish` adds.
fn deltas(vocab: &Vocabulary, prompt: &[u32], output: &[u32], skip_special: bool) -> Vec<String> {
    let mut state = Detokenizer::new(vocab, prompt, skip_special);
    let mut deltas = Vec::new();
    for &id in output {
        let mut delta = String::new();
        state.push(vocab, id, &mut delta);
        deltas.push(delta);
    }
    let mut rest = String::new();
    state.finish(&mut rest);
    deltas.push(rest);
    deltas
}

fn text(vocab: &Vocabulary, prompt: &[u32], output: &[u32], skip_special: bool) -> String {
    deltas(vocab, prompt, output, skip_special).concat()
}

#[test]
fn b083_special_tokens_are_shown_only_when_asked_for() {
    let vocab = byte_level();
    assert!(vocab.is_special(IM_END) && !vocab.is_special(TOOL));
    assert_eq!(text(&vocab, &[], &[HI, IM_END], true), "hi");
    assert_eq!(text(&vocab, &[], &[HI, IM_END], false), "hi<|im_end|>");
}

#[test]
fn b088_characters_over_several_tokens_come_whole() {
    let vocab = byte_level();
    assert_eq!(deltas(&vocab, &[], &ids("hi😀"), true), ["h", "i", "", "", "", "😀", ""]);
    for sample in ["ďábelské", "👨‍👩‍👧", "नमस्ते"] {
        for vocab in [byte_level(), byte_fallback()] {
            let deltas = deltas(&vocab, &[], &ids(sample), true);
            assert!(!deltas.concat().contains(char::REPLACEMENT_CHARACTER));
            assert_eq!(deltas.concat(), sample);
        }
    }
}

#[test]
fn b090_prompt_that_ends_inside_a_character() {
    let before = "earlier 😀".len() - 2;
    for vocab in [byte_level(), byte_fallback()] {
        let all = ids("earlier 😀x");
        assert_eq!(deltas(&vocab, &all[..before], &all[before..], true), ["", "😀", "x", ""]);
    }
    let prompt = &ids("earlier 😀")[..before];
    assert_eq!(text(&byte_level(), prompt, &ids("x"), true), "\u{FFFD}x");
    assert_eq!(text(&byte_fallback(), prompt, &[X], true), "\u{FFFD}\u{FFFD} x");
    assert_eq!(text(&byte_level(), prompt, &[], true), "\u{FFFD}", "the text ends there");
}

#[test]
fn b090_special_tokens_do_not_hide_the_prompts_end() {
    let vocab = byte_level();
    let all = ids("😀");
    let prompt = [&all[..2], &[IM_END; 8]].concat();
    assert_eq!(text(&vocab, &prompt, &all[2..], true), "😀");
    assert_eq!(text(&vocab, &prompt, &all[2..], false), "\u{FFFD}\u{FFFD}", "a shown one does");
}

#[test]
fn b092_ids_outside_the_table_have_no_text() {
    let vocab = byte_level();
    let unknown = vocab.len() as u32;
    assert_eq!(text(&vocab, &[], &[u32::from(b'a'), unknown, u32::from(b'b'), u32::MAX], true), "ab");
    assert_eq!(vocab.bytes(unknown), b"");
    assert!(!vocab.is_special(unknown));
    // The tokenizer does not see them, so that they end no run of bytes either.
    let smile = ids("😀");
    let vocab = byte_fallback();
    assert_eq!(text(&vocab, &[], &[&smile[..2], &[9999], &smile[2..]].concat(), true), "😀");
}

#[test]
fn b093_one_leading_space_is_dropped_at_the_start_of_all_text() {
    let vocab = byte_fallback();
    assert_eq!(text(&vocab, &[], &[SPACE, LEADING, X], true), " leading x");
    assert_eq!(text(&vocab, &[], &[HELLO], true), "Hello");
    assert_eq!(text(&vocab, &[HELLO], &[WORLD], true), " world");
    assert_eq!(text(&vocab, &[BOS], &[HELLO], true), "Hello", "a skipped token is not text");
    assert_eq!(text(&vocab, &[BOS], &[HELLO], false), " Hello", "a shown one is");
    assert_eq!(text(&vocab, &[SPACE], &[WORLD], true), " world", "the prompt's own space was dropped");
    assert_eq!(text(&vocab, &[], &ids(" a"), true), "a", "a byte token's space too");
    assert_eq!(text(&vocab, &[], &[0xE2, X], true), "\u{FFFD} x");
}

#[test]
fn b094_added_tokens_are_joined_without_spaces() {
    let vocab = byte_level();
    let output = [ids("a"), vec![TOOL], ids("b a\nb c")].concat();
    assert_eq!(text(&vocab, &[], &output, true), "a<tool>b a\nb c");
}

#[test]
fn a_run_of_byte_tokens_ends_at_other_text_only() {
    let vocab = byte_fallback();
    let euro = ids("€");
    let with = |middle: &[u32]| [&euro[..2], middle, &euro[2..]].concat();
    let broken = "\u{FFFD}\u{FFFD} x\u{FFFD}";
    assert_eq!(text(&vocab, &[], &with(&[X]), true), broken);
    assert_eq!(text(&vocab, &[], &with(&[BOS]), true), "€");
    assert_eq!(text(&vocab, &[], &with(&[BOS]), false), "\u{FFFD}\u{FFFD}<s>\u{FFFD}");
    assert_eq!(text(&vocab, &[], &with(&[264]), true), "€");
}

/// Byte fallback, decoded as a whole: runs of byte tokens apart from all other text.
fn decode_runs(vocab: &Vocabulary, ids: &[u32], skip_special: bool) -> String {
    let tokens =
        ids.iter().filter(|&&id| !(skip_special && vocab.is_special(id))).filter(|&&id| !vocab.bytes(id).is_empty());
    let mut runs: Vec<(bool, Vec<u8>)> = Vec::new();
    for &id in tokens {
        let is_byte = id < 256;
        match runs.last_mut() {
            Some((kind, run)) if *kind == is_byte => run.extend(vocab.bytes(id)),
            _ => runs.push((is_byte, vocab.bytes(id).to_vec())),
        }
    }
    let mut text = String::new();
    for chunk in runs.iter().flat_map(|(_, run)| run.utf8_chunks()) {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|_| char::REPLACEMENT_CHARACTER));
    }
    text.strip_prefix(' ').map(ToString::to_string).unwrap_or(text)
}

/// Bytes that often are, nearly are, or begin characters of all lengths.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        any::<u8>().prop_map(|byte| vec![byte]),
        any::<char>().prop_map(|c| c.to_string().into_bytes()),
        any::<char>().prop_map(|c| c.to_string().into_bytes()[..1].to_vec()),
        prop::sample::select(vec![0xED, 0xA0, 0x80, 0xE0, 0x9F, 0xF4, 0x90, 0xF0, 0x8F, 0xC1])
            .prop_map(|byte| vec![byte]),
        Just(b" ".to_vec()),
    ];
    vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

fn cut(bytes: &[u8], cuts: &[usize]) -> Vec<Vec<u8>> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
    cuts.extend([0, bytes.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| bytes[pair[0]..pair[1]].to_vec()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// B095: whatever the cuts between tokens, the text at each of them is what decoding all so far gives.
    #[test]
    fn b095_byte_level_equals_lossy_decoding(bytes in bytes(), cuts in vec(any::<usize>(), 0..12)) {
        let tokens = cut(&bytes, &cuts);
        let vocab = Vocabulary::new(&tokens, &[], &[], false);
        let mut state = Detokenizer::new(&vocab, &[], true);
        let mut text = String::new();
        let mut so_far = Vec::new();
        for (id, token) in (0..).zip(&tokens) {
            state.push(&vocab, id, &mut text);
            so_far.extend(token);
            let mut ended = text.clone();
            state.clone().finish(&mut ended);
            prop_assert_eq!(&ended, &String::from_utf8_lossy(&so_far));
            let held = ended.len() - text.len();
            prop_assert!(held == 0 || held == 3, "at most one character is held back");
        }
    }

    /// B095: the same with byte tokens among pieces, special tokens and unknown ids.
    #[test]
    fn b095_byte_fallback_equals_decoding_by_runs(
        ids in vec(prop_oneof![
            bytes().prop_map(|bytes| bytes.iter().map(|&byte| u32::from(byte)).collect()),
            vec(256..270u32, 0..3),
        ], 0..6).prop_map(|runs| runs.concat()),
        skip_special in any::<bool>(),
    ) {
        let vocab = byte_fallback();
        let mut state = Detokenizer::new(&vocab, &[], skip_special);
        let mut text = String::new();
        for (index, &id) in ids.iter().enumerate() {
            state.push(&vocab, id, &mut text);
            let mut ended = text.clone();
            state.clone().finish(&mut ended);
            prop_assert_eq!(ended, decode_runs(&vocab, &ids[..=index], skip_special));
        }
    }

    /// B090: where the prompt ends makes no difference to what follows.
    #[test]
    fn b090_prompt_and_output_join(
        ids in vec(prop_oneof![
            bytes().prop_map(|bytes| bytes.iter().map(|&byte| u32::from(byte)).collect()),
            vec(256..270u32, 0..3),
        ], 0..6).prop_map(|runs| runs.concat()),
        split in any::<usize>(),
        skip_special in any::<bool>(),
    ) {
        for vocab in [byte_level(), byte_fallback()] {
            let (prompt, output) = ids.split_at(split % (ids.len() + 1));
            let mut whole = Detokenizer::new(&vocab, &[], skip_special);
            let mut text_of_prompt = String::new();
            for &id in prompt {
                whole.push(&vocab, id, &mut text_of_prompt);
            }
            let mut expected = String::new();
            for &id in output {
                whole.push(&vocab, id, &mut expected);
            }
            whole.finish(&mut expected);
            prop_assert_eq!(text(&vocab, prompt, output, skip_special), expected);
        }
    }
}
