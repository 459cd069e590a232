//! What `structured_outputs` asks for, and its check without a model; as a grammar of llguidance.

use llguidance::api::TopLevelGrammar;
use llguidance::regex_to_lark;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::gbnf::{is_gbnf, to_lark};

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
    /// Free text with tags whose content fits schemas, as JSON; see [`Tags`].
    StructuralTag(String),
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
            Constraint::StructuralTag(tags) => {
                at_most("structural_tag", MAX_BYTES, tags.len())?;
                Tags::parse(tags).map(|_| ())
            }
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
                // One terminal: as a rule, each choice would be an item of the parser.
                TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}", quoted.join(" | ")))
            }
            Constraint::Grammar(grammar) if is_gbnf(grammar) => TopLevelGrammar::from_lark(to_lark(grammar)),
            Constraint::Grammar(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
            Constraint::StructuralTag(tags) => TopLevelGrammar::from_lark(self.lark_of(&Tags::parse(tags)?)),
        })
    }

    /// The field a grammar came from, for messages.
    pub(crate) fn field(&self) -> &'static str {
        match &self.constraint {
            Constraint::Json(_) => "json",
            Constraint::Regex(_) => "regex",
            Constraint::Choice(_) => "choice",
            Constraint::Grammar(_) => "grammar",
            Constraint::StructuralTag(_) => "structural_tag",
            Constraint::JsonObject => "json_object",
        }
    }

    /// Any text, in which what follows a trigger is one of its tags.
    fn lark_of(&self, tags: &Tags) -> String {
        let quoted = |text: &str| Value::from(text).to_string();
        let mut rules = vec!["TEXT: /(?s:.*)/".to_owned()];
        let mut groups = Vec::new();
        for (i, trigger) in tags.triggers.iter().enumerate() {
            let own = tags.structures.iter().filter(|tag| tags.trigger_of(tag) == Some(i));
            let forms: Vec<String> = own
                .map(|tag| {
                    let schema = self.with_options(tag.schema.clone());
                    format!("{} %json {schema} {}", quoted(&tag.begin[trigger.len()..]), quoted(&tag.end))
                })
                .collect();
            if forms.is_empty() {
                continue;
            }
            rules.push(format!("open_{i}[lazy]: TEXT {}", quoted(trigger)));
            rules.push(format!("tag_{i}: open_{i} ({})", forms.join(" | ")));
            groups.push(format!("tag_{i}"));
        }
        format!("start: ({})* TEXT\n{}\n", groups.join(" | "), rules.join("\n"))
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

/// Tags in free text, with vLLM's names.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tags {
    #[serde(default, rename = "type")]
    _kind: Option<String>,
    structures: Vec<Tag>,
    /// Texts that only tags may follow: each tag begins with one.
    triggers: Vec<String>,
}

/// What stands between `begin` and `end` fits a schema.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tag {
    begin: String,
    schema: Value,
    #[serde(default)]
    end: String,
}

impl Tags {
    fn parse(text: &str) -> Result<Self> {
        let error = |what: String| wrong(format!("structured_outputs.structural_tag must be {what}"));
        let tags: Self = serde_json::from_str(text)
            .map_err(|cause| error(format!("JSON of structures (begin, schema, end) and triggers: {cause}")))?;
        if tags.structures.is_empty() || tags.triggers.iter().any(String::is_empty) {
            return Err(error("given a structure, and triggers that are not empty".to_owned()));
        }
        if let Some(tag) = tags.structures.iter().find(|tag| tags.trigger_of(tag).is_none()) {
            let (begin, triggers) = (&tag.begin, &tags.triggers);
            return Err(error(format!("given a trigger that each tag begins with, got {begin:?} and {triggers:?}")));
        }
        if tags.structures.iter().any(|tag| !tag.schema.is_object() && !tag.schema.is_boolean()) {
            return Err(error("given schemas that are objects, true or false".to_owned()));
        }
        Ok(tags)
    }

    /// The shortest trigger that a tag begins with: in a text it is there before the others.
    fn trigger_of(&self, tag: &Tag) -> Option<usize> {
        let own = self.triggers.iter().enumerate().filter(|(_, trigger)| tag.begin.starts_with(trigger.as_str()));
        own.min_by_key(|(_, trigger)| trigger.len()).map(|(i, _)| i)
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
