//! Token ids to text, piece by piece, and stop strings in that text.
//!
//! The text of a sequence is what decoding all its tokens at once would give, made as soon as it is certain: a
//! character whose bytes are spread over several tokens appears when the last of them arrives, and bytes that can no
//! longer become a character appear as U+FFFD. Two kinds of vocabulary are told apart by their `byte_ids`:
//!
//! - *byte-level*: no byte ids. The bytes of all tokens are joined and read as UTF-8; invalid bytes are replaced as
//!   [`String::from_utf8_lossy`] does, one U+FFFD for each maximal subpart of a character.
//! - *byte fallback* (`SentencePiece`): a run of byte tokens forms characters of its own; any other token that has
//!   text ends the run. Each byte left over becomes one U+FFFD. (Hugging Face replaces every byte of a run that is
//!   invalid as a whole, also those of whole characters in it; a stream has already shown these.)

use std::ops::Range;
use std::str;

const SPECIAL: u8 = 1;
const BYTE: u8 = 2;

/// The bytes that each token id adds to the text. Immutable; one for all sequences.
#[derive(Debug)]
pub struct Vocabulary {
    /// The bytes of all tokens, one after the other.
    arena: Box<[u8]>,
    /// Where each token's bytes begin in the arena, and at last where the arena ends.
    offsets: Box<[u32]>,
    /// `SPECIAL` and `BYTE`, for each token.
    flags: Box<[u8]>,
    strip_leading_space: bool,
}

impl Vocabulary {
    /// A vocabulary of ids `0..n`, where `token_bytes` yields n items.
    ///
    /// `special_ids` have text only for sequences that show special tokens. `byte_ids` are the byte tokens of a
    /// byte-fallback vocabulary. With `strip_leading_space` one space at the very start of a text, prompt included, is
    /// not part of it. Ids outside the table are ignored, here and everywhere: they have no text.
    ///
    /// # Panics
    ///
    /// If the table holds 4 GiB or more.
    pub fn new(
        token_bytes: impl IntoIterator<Item = impl AsRef<[u8]>>,
        special_ids: &[u32],
        byte_ids: &[u32],
        strip_leading_space: bool,
    ) -> Self {
        let mut arena = Vec::new();
        let mut offsets = vec![0];
        for bytes in token_bytes {
            arena.extend_from_slice(bytes.as_ref());
            offsets.push(u32::try_from(arena.len()).expect("a token table is smaller than 4 GiB"));
        }
        let mut flags = vec![0; offsets.len() - 1];
        for (ids, flag) in [(special_ids, SPECIAL), (byte_ids, BYTE)] {
            for &id in ids {
                if let Some(flags) = flags.get_mut(id as usize) {
                    *flags |= flag;
                }
            }
        }
        Self { arena: arena.into(), offsets: offsets.into(), flags: flags.into(), strip_leading_space }
    }

    /// Number of ids.
    pub fn len(&self) -> usize {
        self.flags.len()
    }

    /// Whether there are no ids at all.
    pub fn is_empty(&self) -> bool {
        self.flags.is_empty()
    }

    /// Whether `id` is a special token.
    pub fn is_special(&self, id: u32) -> bool {
        self.flags_of(id) & SPECIAL != 0
    }

    /// The bytes of `id`, special or not.
    pub fn bytes(&self, id: u32) -> &[u8] {
        match self.offsets.get(id as usize..) {
            Some(&[start, end, ..]) => &self.arena[start as usize..end as usize],
            _ => &[],
        }
    }

    fn flags_of(&self, id: u32) -> u8 {
        self.flags.get(id as usize).copied().unwrap_or(0)
    }

    /// The bytes that `id` adds to a text: none if it is a special token and these are skipped.
    fn visible_bytes(&self, id: u32, skip_special_tokens: bool) -> &[u8] {
        if skip_special_tokens && self.is_special(id) { &[] } else { self.bytes(id) }
    }
}

/// What the text of one sequence depends on beyond its next tokens. A few bytes: a beam's fork copies it.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    /// The first `num_held` bytes: the beginning of a character.
    held: [u8; 3],
    num_held: u8,
    /// Whether the next character is the first of the text and dropped if it is a space.
    strip_space: bool,
    /// Whether the last token with text was a byte token.
    in_byte_run: bool,
    skip_special_tokens: bool,
}

impl Detokenizer {
    /// The state after `prompt`, whose own text is not wanted: the text begins with the first character that is not
    /// wholly of the prompt.
    pub fn new(vocab: &Vocabulary, prompt: &[u32], skip_special_tokens: bool) -> Self {
        let mut state = Self {
            held: [0; 3],
            num_held: 0,
            strip_space: vocab.strip_leading_space,
            in_byte_run: false,
            skip_special_tokens,
        };
        // Three bytes decide what is held, and their mere presence that the text has begun.
        let mut num_bytes = 0;
        let mut start = prompt.len();
        while start > 0 && num_bytes < 3 {
            start -= 1;
            num_bytes += vocab.visible_bytes(prompt[start], skip_special_tokens).len();
        }
        let mut prompt_text = String::new();
        for &id in &prompt[start..] {
            state.push(vocab, id, &mut prompt_text);
        }
        state
    }

    /// Append to `out` the text that token `id` completes.
    pub fn push(&mut self, vocab: &Vocabulary, id: u32, out: &mut String) {
        let bytes = vocab.visible_bytes(id, self.skip_special_tokens);
        if bytes.is_empty() {
            return;
        }
        let is_byte = vocab.flags_of(id) & BYTE != 0;
        if is_byte != self.in_byte_run {
            self.finish(out);
            self.in_byte_run = is_byte;
        }
        let rest = self.complete_held(bytes, out);
        self.decode(rest, out);
    }

    /// Append to `out` what is held back, as U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if self.num_held > 0 {
            self.replace(usize::from(self.num_held), out);
            self.num_held = 0;
        }
    }

    /// Add bytes to the held ones until these are a character or cannot become one; the bytes not used.
    fn complete_held<'a>(&mut self, mut bytes: &'a [u8], out: &mut String) -> &'a [u8] {
        while self.num_held > 0
            && let Some((&byte, rest)) = bytes.split_first()
        {
            let num_held = usize::from(self.num_held);
            let mut character = [0; 4];
            character[..num_held].copy_from_slice(&self.held[..num_held]);
            character[num_held] = byte;
            match str::from_utf8(&character[..=num_held]) {
                Ok(character) => {
                    self.emit(character, out);
                    self.num_held = 0;
                }
                Err(error) if error.error_len().is_none() => {
                    self.held[num_held] = byte;
                    self.num_held += 1;
                }
                Err(_) => {
                    self.finish(out);
                    return bytes;
                }
            }
            bytes = rest;
        }
        bytes
    }

    /// Decode bytes that follow whole characters; hold an incomplete one at their end.
    fn decode(&mut self, mut bytes: &[u8], out: &mut String) {
        loop {
            let error = match str::from_utf8(bytes) {
                Ok(text) => return self.emit(text, out),
                Err(error) => error,
            };
            let (valid, rest) = bytes.split_at(error.valid_up_to());
            self.emit(str::from_utf8(valid).unwrap_or_default(), out);
            let Some(num_invalid) = error.error_len() else {
                self.held[..rest.len()].copy_from_slice(rest);
                self.num_held = rest.len() as u8;
                return;
            };
            self.replace(num_invalid, out);
            bytes = &rest[num_invalid..];
        }
    }

    /// Stand in for `num_bytes` bytes, one maximal subpart of a character.
    fn replace(&mut self, num_bytes: usize, out: &mut String) {
        self.strip_space = false;
        let count = if self.in_byte_run { num_bytes } else { 1 };
        out.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, count));
    }

    fn emit(&mut self, text: &str, out: &mut String) {
        if self.strip_space && !text.is_empty() {
            self.strip_space = false;
            out.push_str(text.strip_prefix(' ').unwrap_or(text));
        } else {
            out.push_str(text);
        }
    }
}

/// A stop string, with the table of Knuth, Morris and Pratt: time is linear whatever the text and the string.
#[derive(Debug)]
struct Pattern {
    bytes: Box<[u8]>,
    /// For each prefix, by its length - 1: the longest shorter prefix that is also its suffix.
    borders: Box<[u32]>,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let mut pattern = Self { bytes: text.as_bytes().into(), borders: vec![0; text.len()].into() };
        let mut matched = 0;
        for end in 1..text.len() {
            matched = pattern.advance(matched, pattern.bytes[end]);
            pattern.borders[end] = matched as u32;
        }
        pattern
    }

    /// The longest prefix that ends a text with `byte` appended, if `matched` is that of the text (and not the whole).
    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        while self.bytes[matched] != byte {
            if matched == 0 {
                return 0;
            }
            matched = self.borders[matched - 1] as usize;
        }
        matched + 1
    }
}

/// The stop strings of one request.
#[derive(Debug)]
pub struct StopStrings {
    patterns: Box<[Pattern]>,
}

impl StopStrings {
    /// Empty strings never match.
    pub fn new(stops: &[String]) -> Self {
        Self { patterns: stops.iter().map(|stop| Pattern::new(stop)).collect() }
    }

    /// Whether there are no stop strings.
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// The first match that ends after byte `new_from` of `text`: index of the stop string and byte range.
    ///
    /// First is what ends first, so that the result does not depend on how tokens cut the text; of several that end
    /// together, the one named first. Bytes before `new_from` are looked at only as the beginning of such a match.
    pub fn find(&self, text: &str, new_from: usize) -> Option<(usize, Range<usize>)> {
        let mut found: Option<(usize, Range<usize>)> = None;
        for (index, pattern) in self.patterns.iter().enumerate().filter(|(_, pattern)| !pattern.bytes.is_empty()) {
            let start = (new_from + 1).saturating_sub(pattern.bytes.len());
            let end = found.as_ref().map_or(text.len(), |(_, range)| range.end - 1);
            let mut matched = 0;
            for (offset, &byte) in text.as_bytes().get(start..end).unwrap_or_default().iter().enumerate() {
                matched = pattern.advance(matched, byte);
                if matched == pattern.bytes.len() {
                    let end = start + offset + 1;
                    found = Some((index, end - matched..end));
                    break;
                }
            }
        }
        found
    }

    /// Length in bytes of the longest suffix of `text` that more text could complete to a stop string.
    pub fn held_back(&self, text: &str) -> usize {
        let held_by = |pattern: &Pattern| {
            let start = (text.len() + 1).saturating_sub(pattern.bytes.len());
            text.as_bytes()[start.min(text.len())..].iter().fold(0, |matched, &byte| pattern.advance(matched, byte))
        };
        self.patterns.iter().map(held_by).max().unwrap_or(0)
    }
}
