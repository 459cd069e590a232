//! Regular expressions that end a text, against the definition: of all matches the one that ends first.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use pyvllm_core::stop_regex::{MAX_MATCH, RegexSearch, StopRegexes};
use regex::Regex;

/// Feed pieces until a match: the expression and its range, and the bytes held back after each piece.
fn search(patterns: &[&str], pieces: &[&str]) -> (Option<(usize, std::ops::Range<usize>)>, Vec<usize>) {
    let patterns: Vec<String> = patterns.iter().map(ToString::to_string).collect();
    let regexes = StopRegexes::new(&patterns).unwrap();
    let (mut search, mut text, mut held) = (RegexSearch::default(), String::new(), Vec::new());
    for piece in pieces {
        text.push_str(piece);
        if let Some(found) = regexes.find(&mut search, &text, 0) {
            return (Some(found), held);
        }
        held.push(search.held_back(text.len()));
    }
    (None, held)
}

/// By trying all ranges.
fn naive(patterns: &[&str], text: &str) -> Option<(usize, std::ops::Range<usize>)> {
    let whole: Vec<Regex> = patterns.iter().map(|pattern| Regex::new(&format!("^(?:{pattern})$")).unwrap()).collect();
    for end in (1..=text.len()).filter(|&end| text.is_char_boundary(end)) {
        for start in (0..end).filter(|&start| text.is_char_boundary(start)) {
            if let Some(pattern) = whole.iter().position(|regex| regex.is_match(&text[start..end])) {
                return Some((pattern, start..end));
            }
        }
    }
    None
}

const PATTERNS: [&str; 9] =
    ["ab+c", "[0-9]{2,}", "a.c", "(ab|b)a", "é|日.", "c(a|b)*c", "(?i)AB", r"\d\s\w", "a{3}|bb"];

proptest! {
    #[test]
    fn the_match_that_ends_first_is_found_however_the_text_is_cut(
        text in "[abc1 é日]{0,24}",
        chosen in proptest::collection::vec(0..PATTERNS.len(), 1..4),
        cuts in proptest::collection::vec(any::<bool>(), 24),
    ) {
        let patterns: Vec<&str> = chosen.iter().map(|&i| PATTERNS[i]).collect();
        let mut pieces = vec![String::new()];
        for (character, cut) in text.chars().zip(cuts) {
            if cut {
                pieces.push(String::new());
            }
            pieces.last_mut().unwrap().push(character);
        }
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let (found, held) = search(&patterns, &pieces);
        prop_assert_eq!(&found, &naive(&patterns, &text));
        // What was shown before the match is no part of it.
        if let Some((_, range)) = found {
            let mut shown = 0;
            for (piece, held) in pieces.iter().zip(held) {
                shown += piece.len();
                prop_assert!(shown - held <= range.start);
            }
        }
    }
}

#[test]
fn only_text_that_may_still_match_is_held_back() {
    assert_eq!(search(&["User [0-9]+:"], &["hi ", "Us", "er 1", "2", "x"]), (None, vec![0, 2, 6, 7, 0]));
    assert_eq!(search(&["User [0-9]+:"], &["hi User 12", ":"]).0, Some((0, 3..11)));
}

#[test]
fn lines_and_words_may_be_told_from_the_text_before() {
    assert_eq!(search(&["^b"], &["ab", "b"]).0, None);
    assert_eq!(search(&["(?m)^b"], &["ab\n", "b"]).0, Some((0, 3..4)));
    assert_eq!(search(&[r"\b{start-half}foo"], &["xfoo ", "foo"]).0, Some((0, 5..8)));
}

#[test]
fn a_match_has_a_greatest_length() {
    let filler = "x".repeat(MAX_MATCH);
    assert_eq!(search(&["a.*b"], &["a", &filler, "b"]).0, None);
    assert_eq!(search(&["a.*b"], &["a", &filler[2..], "b"]).0, Some((0, 0..MAX_MATCH)));
    let (_, held) = search(&["a.*b"], &["a", &filler, "yyy"]);
    assert_eq!(held, [1, 0, 0]);
}

#[test]
fn what_cannot_be_followed_is_refused() {
    for (pattern, message) in [
        ("(", r#"a regular expression (unclosed group), got ["("]"#),
        ("a*", r#"an expression that does not match the empty string, got ["a*"]"#),
        ("", r#"an expression that does not match the empty string, got [""]"#),
        ("a$", "without looks at the text that follows"),
        (r"\bfoo", "without looks at the text that follows"),
        ("(a{1000}){1000}", "at most 262144 bytes large once compiled"),
        (r"\w{1,999}", "at most 262144 bytes large once compiled"),
        (&"a".repeat(5000), "at most 4096 bytes long, got 5000"),
        (&"(".repeat(2000), "a regular expression (unclosed group)"),
    ] {
        let error = StopRegexes::new(&[pattern.to_owned()]).unwrap_err().to_string();
        assert!(error.starts_with("stop_regex must be ") && error.contains(message), "{error}");
        assert!(error.len() < 300, "{error}");
    }
}

#[test]
fn s026_a_hostile_expression_takes_linear_time() {
    let text = "a".repeat(100_000);
    let begin = std::time::Instant::now();
    assert_eq!(search(&["(a+)+b", "(a|a)*c", "(a?){100}d"], &[&text]).0, None);
    assert!(begin.elapsed().as_secs() < 5, "{:?}", begin.elapsed());
}
