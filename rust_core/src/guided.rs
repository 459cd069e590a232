//! What `structured_outputs` asks for, and its check without a model; as a grammar of llguidance.

use llguidance::api::TopLevelGrammar;
use llguidance::regex_to_lark;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{Error, Result};

/// Most bytes of a schema, expression, grammar, or of all choices together.
const MAX_BYTES: usize = 1 << 18;
/// Most bytes of a regular expression.
const MAX_REGEX: usize = 1 << 14;
/// Most choices.
const MAX_CHOICES: usize = 4096;

/// The form that an output must have.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Constraint {
    /// A JSON schema, as JSON.
    Json(String),
    /// A regular expression that the whole text matches.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar, in Lark's or GBNF's notation.
    Grammar(String),
    /// Any JSON object.
    JsonObject,
}

/// A constraint with its options.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StructuredOutputs {
    /// What the output must be.
    pub constraint: Constraint,
    /// JSON without any whitespace.
    pub disable_any_whitespace: bool,
    /// Objects of a schema have no properties but those it names, unless it says something about them.
    pub disable_additional_properties: bool,
    /// Regular expression of the whitespace between JSON's tokens.
    pub whitespace_pattern: Option<String>,
}

fn wrong(message: String) -> Error {
    Error::parameter("structured_outputs", message)
}

fn at_most(what: &str, most: usize, found: usize) -> Result<()> {
    if found <= most {
        return Ok(());
    }
    Err(wrong(format!("structured_outputs.{what} must have at most {most} bytes, got {found}")))
}

impl StructuredOutputs {
    /// Check what needs no compilation: sizes, and that a schema is JSON.
    pub fn validate(&self) -> Result<()> {
        at_most("whitespace_pattern", MAX_REGEX, self.whitespace_pattern.as_ref().map_or(0, String::len))?;
        match &self.constraint {
            Constraint::Json(schema) => {
                at_most("json", MAX_BYTES, schema.len())?;
                schema_of(schema).map(|_| ())
            }
            Constraint::Regex(regex) => at_most("regex", MAX_REGEX, regex.len()),
            Constraint::Grammar(grammar) => at_most("grammar", MAX_BYTES, grammar.len()),
            Constraint::Choice(choices) => {
                if choices.is_empty() || choices.len() > MAX_CHOICES || choices.iter().any(String::is_empty) {
                    return Err(wrong(format!(
                        "structured_outputs.choice must hold 1 to {MAX_CHOICES} strings that are not empty, got {}",
                        choices.len()
                    )));
                }
                at_most("choice", MAX_BYTES, choices.iter().map(String::len).sum())
            }
            Constraint::JsonObject => Ok(()),
        }
    }

    /// The grammar to compile.
    pub(crate) fn grammar(&self) -> Result<TopLevelGrammar> {
        Ok(match &self.constraint {
            Constraint::Json(schema) => TopLevelGrammar::from_json_schema(self.with_options(schema_of(schema)?)),
            Constraint::JsonObject => TopLevelGrammar::from_json_schema(self.with_options(json!({"type": "object"}))),
            // \d, \w and \s are ASCII's, as in JSON Schema: who asks for digits gets what can be read as a number.
            Constraint::Regex(regex) => TopLevelGrammar::from_lark(format!("start: /{}/", regex_to_lark(regex, "dws"))),
            Constraint::Choice(choices) => {
                let quoted: Vec<String> =
                    choices.iter().map(|choice| Value::from(choice.as_str()).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", quoted.join(" | ")))
            }
            Constraint::Grammar(grammar) if grammar.contains("::=") => TopLevelGrammar::from_lark(lark(grammar)),
            Constraint::Grammar(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        })
    }

    /// The field a grammar came from, for messages.
    pub(crate) fn field(&self) -> &'static str {
        match &self.constraint {
            Constraint::Json(_) => "json",
            Constraint::Regex(_) => "regex",
            Constraint::Choice(_) => "choice",
            Constraint::Grammar(_) => "grammar",
            Constraint::JsonObject => "json_object",
        }
    }

    fn with_options(&self, mut schema: Value) -> Value {
        if self.disable_additional_properties {
            forbid_additional_properties(&mut schema);
        }
        // A schema may be `true`, which has no place for options.
        if !schema.is_object() {
            schema = json!({"allOf": [schema]});
        }
        if let Some(fields) = schema.as_object_mut() {
            let mut options = json!({"whitespace_flexible": !self.disable_any_whitespace, "coerce_one_of": true});
            if let Some(pattern) = &self.whitespace_pattern {
                options["whitespace_pattern"] = Value::from(pattern.as_str());
            }
            fields.insert("x-guidance".to_owned(), options);
        }
        schema
    }
}

fn schema_of(text: &str) -> Result<Value> {
    let schema: Value = serde_json::from_str(text)
        .map_err(|error| wrong(format!("structured_outputs.json must be a JSON schema, got no JSON: {error}")))?;
    if schema.is_object() || schema.is_boolean() {
        return Ok(schema);
    }
    Err(wrong("structured_outputs.json must be a JSON schema: an object, true or false".to_owned()))
}

fn forbid_additional_properties(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            fields.values_mut().for_each(forbid_additional_properties);
            let says = fields.contains_key("additionalProperties") || fields.contains_key("patternProperties");
            if fields.get("properties").is_some_and(Value::is_object) && !says {
                fields.insert("additionalProperties".to_owned(), Value::from(false));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(forbid_additional_properties),
        _ => {}
    }
}

/// A grammar in GBNF, as llama.cpp writes them, in Lark's notation: `root` becomes `start`, names get underscores, classes
/// of characters become regular expressions.
fn lark(gbnf: &str) -> String {
    let mut out = String::new();
    let mut rest = gbnf;
    while let Some(first) = rest.chars().next() {
        let len = match first {
            '"' => quoted_len(rest, '"'),
            '[' => {
                let len = quoted_len(rest, ']');
                out.extend(["/", &rest[..len].replace('/', "\\/"), "/"]);
                rest = &rest[len..];
                continue;
            }
            '#' => {
                out.push_str("//");
                let len = rest.find('\n').unwrap_or(rest.len());
                out.push_str(&rest[1..len]);
                rest = &rest[len..];
                continue;
            }
            ':' if rest.starts_with("::=") => {
                out.push(':');
                rest = &rest[3..];
                continue;
            }
            first if first.is_alphabetic() => {
                let len = rest.find(|c: char| !c.is_alphanumeric() && c != '-' && c != '_').unwrap_or(rest.len());
                let name = rest[..len].replace('-', "_").to_lowercase();
                out.push_str(if name == "root" { "start" } else { &name });
                rest = &rest[len..];
                continue;
            }
            first => first.len_utf8(),
        };
        out.push_str(&rest[..len]);
        rest = &rest[len..];
    }
    out
}

/// Bytes up to and including the closing character of what begins the text; all if there is none.
fn quoted_len(text: &str, close: char) -> usize {
    let mut escaped = false;
    for (at, character) in text.char_indices().skip(1) {
        if character == close && !escaped {
            return at + close.len_utf8();
        }
        escaped = character == '\\' && !escaped;
    }
    text.len()
}
