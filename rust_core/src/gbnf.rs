//! Grammars in GBNF, as llama.cpp and xgrammar write them, in Lark's notation.

use serde_json::Value;

/// Whether a grammar is written in GBNF: a line of it defines a rule with `::=`.
pub(crate) fn is_gbnf(grammar: &str) -> bool {
    grammar.lines().any(is_rule)
}

fn is_rule(line: &str) -> bool {
    line.trim_start().trim_start_matches(in_name).trim_start().starts_with("::=")
}

fn in_name(c: char) -> bool {
    c.is_alphanumeric() || c == '-' || c == '_'
}

/// The same grammar for llguidance: `root` becomes `start`, other rules get lower-case names that stay apart, classes of
/// characters become regular expressions, comments go.
pub(crate) fn to_lark(gbnf: &str) -> String {
    let mut out = String::new();
    let mut names: Vec<&str> = Vec::new();
    let mut depth = 0_usize;
    // Whether a rule cannot end here: inside parentheses, behind ::= and |.
    let mut goes_on = false;
    let mut rest = gbnf;
    while let Some(first) = rest.chars().next() {
        let len = match first {
            '"' | '[' | '{' => match closed_len(rest, closing(first)) {
                Some(len) => len,
                // What is wrong with it, Lark's parser says.
                None => return out + rest,
            },
            '#' => rest.find('\n').unwrap_or(rest.len()),
            ':' if rest.starts_with("::=") => 3,
            first if in_name(first) => rest.find(|c| !in_name(c)).unwrap_or(rest.len()),
            first => first.len_utf8(),
        };
        let (token, after) = rest.split_at(len);
        match first {
            '"' => out.push_str(&Value::from(unescaped(&token[1..len - 1])).to_string()),
            '[' => out.push_str(&class(token)),
            '#' | '\r' => {}
            ':' if len == 3 => out.push(':'),
            '.' => out.push_str("/(?s:.)/"),
            '\n' if goes_on && !begins_with_rule(after) => out.push(' '),
            first if in_name(first) => out.push_str(&rule_name(token, &mut names)),
            _ => {
                depth = (depth + usize::from(first == '(')).saturating_sub(usize::from(first == ')'));
                out.push_str(token);
            }
        }
        if !first.is_whitespace() && first != '#' {
            goes_on = depth > 0 || first == '|' || len == 3 && first == ':';
        }
        rest = after;
    }
    out
}

fn closing(open: char) -> char {
    match open {
        '[' => ']',
        '{' => '}',
        same => same,
    }
}

/// Whether the first line that says something begins a rule.
fn begins_with_rule(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim_start);
    lines.find(|line| !line.is_empty() && !line.starts_with('#')).is_some_and(is_rule)
}

/// A class of characters as an expression, where more characters are special than in GBNF: `/` ends it, `[`, `&&`, `~~`
/// and `--` combine classes.
fn class(token: &str) -> String {
    let inside = &token[1..token.len() - 1];
    let (negation, mut rest) = inside.strip_prefix('^').map_or(("", inside), |rest| ("^", rest));
    let mut out = format!("/[{negation}");
    // A dash that begins the class, or ends a range, stands for itself.
    let mut is_plain_dash = true;
    while let Some(first) = rest.chars().next() {
        let is_range = first == '-' && !is_plain_dash;
        if matches!(first, '/' | '[' | '&' | '~' | '-') && !is_range {
            out.push('\\');
        }
        let num_chars = if first == '\\' { 2 } else { 1 };
        let len = rest.chars().take(num_chars).map(char::len_utf8).sum();
        out.push_str(&rest[..len]);
        is_plain_dash = is_range;
        rest = &rest[len..];
    }
    out + "]/"
}

/// The name of a rule: what Lark allows of it, and its place among all names, so that no two become one.
fn rule_name<'a>(name: &'a str, names: &mut Vec<&'a str>) -> String {
    if name == "root" {
        return "start".to_owned();
    }
    let place = names.iter().position(|known| *known == name).unwrap_or_else(|| {
        names.push(name);
        names.len() - 1
    });
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
    format!("r_{}_{place}", name.chars().map(plain).collect::<String>())
}

/// The text of a string of GBNF.
fn unescaped(mut rest: &str) -> String {
    let mut text = String::new();
    while let Some((before, escape)) = rest.split_once('\\') {
        text.push_str(before);
        let kind = escape.chars().next().unwrap_or('\\');
        let digits = match kind {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        let after = escape.get(kind.len_utf8()..).unwrap_or_default();
        let code = after.get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok()).and_then(char::from_u32);
        let (character, used) = match (kind, code) {
            ('n', _) => ('\n', 0),
            ('r', _) => ('\r', 0),
            ('t', _) => ('\t', 0),
            (_, Some(character)) => (character, digits),
            (other, None) => (other, 0),
        };
        text.push(character);
        rest = after.get(used..).unwrap_or_default();
    }
    text + rest
}

/// Bytes up to and including the closing character of what begins the text.
fn closed_len(text: &str, close: char) -> Option<usize> {
    let mut escaped = false;
    for (at, character) in text.char_indices().skip(1) {
        if character == close && !escaped {
            return Some(at + close.len_utf8());
        }
        escaped = character == '\\' && !escaped;
    }
    None
}
