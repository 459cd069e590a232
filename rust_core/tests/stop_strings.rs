//! Stop strings: what is found, what is withheld meanwhile, and what of it depends on the cuts between tokens (nothing).

use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;
use pyvllm_core::detokenizer::StopStrings;

/// Streams as the engine does; the pieces sent and the stop string that ended the text.
fn stream(pieces: &[&str], stops: &[&str], include_stop: bool) -> (Vec<String>, Option<usize>) {
    let stops = StopStrings::new(&stops.iter().map(ToString::to_string).collect::<Vec<_>>());
    let (mut text, mut sent, mut num_sent) = (String::new(), Vec::new(), 0);
    for piece in pieces {
        let new_from = text.len();
        text.push_str(piece);
        if let Some((index, Range { start, end })) = stops.find(&text, new_from) {
            sent.push(text[num_sent..if include_stop { end } else { start }].to_string());
            return (sent, Some(index));
        }
        let certain = text.len() - stops.held_back(&text);
        sent.push(text[num_sent..certain].to_string());
        num_sent = certain;
    }
    sent.push(text[num_sent..].to_string());
    (sent, None)
}

#[test]
fn b077_no_part_of_a_stop_string_is_streamed() {
    let letters: Vec<String> = ('A'..='M').map(String::from).collect();
    let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
    let (sent, stop) = stream(&letters, &["DEFGHIJ"], false);
    assert_eq!(sent, ["A", "B", "C", "", "", "", "", "", "", ""].map(String::from));
    assert_eq!(stop, Some(0));
    assert_eq!(stream(&letters, &["DEFGHIJ"], true).0.concat(), "ABCDEFGHIJ");
    assert_eq!(stream(&["ABCDEFGHIJKLM"], &["DEFGHIJ"], false).0, ["ABC"]);
}

#[test]
fn b079_what_was_withheld_is_sent_at_the_end() {
    let (sent, stop) = stream(&["hel", "lo", "ZZ"], &["ZZZZZZ"], false);
    assert_eq!(sent, ["hel", "lo", "", "ZZ"]);
    assert_eq!(stop, None);
    assert_eq!(stream(&["hello"], &["ZZZZZZ"], false).0.concat(), "hello");
}

#[test]
fn stop_strings_that_end_together_or_overlap() {
    let stops = |stops: &[&str]| StopStrings::new(&stops.iter().map(ToString::to_string).collect::<Vec<_>>());
    assert_eq!(stops(&["b", "ab"]).find("xab", 0), Some((0, 2..3)));
    assert_eq!(stops(&["ab", "b"]).find("xab", 0), Some((0, 1..3)));
    assert_eq!(stops(&["abcdX", "bcd"]).find("abcdX", 0), Some((1, 1..4)));
    assert_eq!(stops(&["aab"]).find("aaab", 3), Some((0, 1..4)), "begins before the new part");
    assert_eq!(stops(&["ab"]).find("abxx", 2), None, "ends before it");
    assert_eq!(stops(&["\u{20AC}"]).find("\u{20AC}\u{20AC}", 3), Some((0, 3..6)));
    assert_eq!(stops(&["", "b"]).find("ab", 0), Some((1, 1..2)));
    assert_eq!(stops(&[""]).held_back("ab"), 0);
    assert!(stops(&[]).is_empty() && stops(&[]).find("ab", 0).is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn find_equals_naive_search(text in "[ab€]{0,12}", stops in vec("[ab€]{0,4}", 0..4), new_from in any::<usize>()) {
        let new_from = new_from % (text.len() + 1);
        let mut expected = None;
        'ends: for end in new_from + 1..=text.len() {
            for (index, stop) in stops.iter().enumerate() {
                if !stop.is_empty() && text.as_bytes()[..end].ends_with(stop.as_bytes()) {
                    expected = Some((index, end - stop.len()..end));
                    break 'ends;
                }
            }
        }
        prop_assert_eq!(StopStrings::new(&stops).find(&text, new_from), expected);
    }

    #[test]
    fn held_back_equals_naive_search(text in "[ab€]{0,12}", stops in vec("[ab€]{0,6}", 0..4)) {
        let naive = text
            .char_indices()
            .map(|(start, _)| &text[start..])
            .find(|tail| stops.iter().any(|stop| stop.len() > tail.len() && stop.starts_with(tail)))
            .map_or(0, str::len);
        prop_assert_eq!(StopStrings::new(&stops).held_back(&text), naive);
    }

    /// What is streamed, and where it stops, does not depend on how the text was cut into tokens.
    #[test]
    fn b077_streamed_equals_whole(
        pieces in vec("[abc]{0,3}", 0..8),
        stops in vec("[abc]{1,4}", 0..3),
        include_stop in any::<bool>(),
    ) {
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let (sent, stop) = stream(&pieces, &stops, include_stop);
        let (whole, stop_of_whole) = stream(&[&pieces.concat()], &stops, include_stop);
        prop_assert_eq!(sent.concat(), whole.concat());
        prop_assert_eq!(stop, stop_of_whole);
    }
}
