//! Chat templates: what a model was trained to see for a conversation.
//!
//! A folder's template is Jinja as Hugging Face's `apply_chat_template` renders it: blocks are trimmed, `raise_exception`,
//! `strftime_now` and `tojson` are there, strings and lists have Python's methods, and `None` and `True` are written as
//! Python writes them. A folder without a template gets the plain form, which any model can continue:
//!
//! ```text
//!   system: You are brief.
//!   user: Hello!
//!   assistant:
//! ```

use std::collections::BTreeMap;

use jiff::Zoned;
use jiff::fmt::strtime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::TokenizerError;

const NAME: &str = "chat";
/// Instructions that a template may take for a conversation: some hundred for each of the most messages that are read, and seconds at most.
const MOST_STEPS: u64 = 10_000_000;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
    /// Who said it, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// What a template is told beside the messages.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatOptions {
    /// End with the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Variables of the template's own, such as `enable_thinking`.
    pub variables: serde_json::Map<String, serde_json::Value>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, variables: serde_json::Map::new() }
    }
}

/// How conversations are written.
#[derive(Debug)]
pub(super) enum ChatTemplate {
    /// With the byte tokenizer's own tokens.
    Markers,
    /// As in the picture above.
    Plain,
    /// As the model's folder says.
    Jinja(Box<JinjaTemplate>),
}

/// The plain form.
pub(super) fn plain(messages: &[ChatMessage], add_generation_prompt: bool) -> String {
    let mut text = String::new();
    for message in messages {
        text += &format!("{}: {}\n", message.role, message.content);
    }
    if add_generation_prompt {
        text += "assistant:";
    }
    text
}

/// A template that was read once, and the special tokens it may name.
#[derive(Debug)]
pub(super) struct JinjaTemplate {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
}

impl JinjaTemplate {
    /// `special_tokens` are the template's variables `bos_token`, `eos_token` and their like. The error is a sentence.
    pub(super) fn new(source: String, special_tokens: BTreeMap<String, String>) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_fuel(Some(MOST_STEPS));
        environment.set_syntax(syntax.map_err(|error| sentence(&error))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, state, value| match value.kind() {
            ValueKind::None => Ok(out.write_str("None")?),
            ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
            _ => minijinja::escape_formatter(out, state, value),
        });
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, source).map_err(|error| sentence(&error))?;
        Ok(Self { environment, special_tokens })
    }

    pub(super) fn render(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String, TokenizerError> {
        let mut variables = options.variables.clone();
        for (name, token) in &self.special_tokens {
            variables.insert(name.clone(), token.as_str().into());
        }
        variables.insert("add_generation_prompt".to_owned(), options.add_generation_prompt.into());
        let own = Value::from(Serde(variables));
        let messages = Value::from(Serde(messages));
        let context = minijinja::context! { messages, tools => (), documents => (), ..own };
        let rendered = self.environment.get_template(NAME).and_then(|template| template.render(context));
        rendered.map_err(|error| TokenizerError::Template { what: sentence(&error) })
    }
}

/// What a template refused in its own words, or what is wrong with it and where.
fn sentence(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        _ if error.kind() == ErrorKind::OutOfFuel => {
            format!("it takes more than {MOST_STEPS} steps for these messages")
        }
        Some(line) if error.kind() != ErrorKind::InvalidOperation => format!("{what} (line {line} of the template)"),
        _ => what,
    }
}

fn raise_exception(what: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, what))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    strtime::format(format, &Zoned::now()).map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// As Python's `json.dumps` writes: a space behind every comma and colon, nothing escaped for HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Hugging Face's filter takes these too; what they change is not wanted by any template we know of.
    let _: (Option<bool>, Option<bool>) = (options.get("ensure_ascii")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    let mut json = Vec::new();
    let written = match indent {
        Some(width) => {
            let indent = " ".repeat(width.min(16));
            value.serialize(&mut Serializer::with_formatter(&mut json, PrettyFormatter::with_indent(indent.as_bytes())))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut json, Spaced)),
    };
    let wrong = |what: String| Error::new(ErrorKind::BadSerialization, what);
    written.map_err(|error| wrong(error.to_string()))?;
    String::from_utf8(json).map_err(|error| wrong(error.to_string()))
}

/// `{"a": 1, "b": [2, 3]}`
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(role: &str, content: &str) -> ChatMessage {
        ChatMessage { role: role.to_owned(), content: content.to_owned(), name: None }
    }

    fn render(source: &str, messages: &[ChatMessage]) -> Result<String, String> {
        let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
        let template = JinjaTemplate::new(source.to_owned(), tokens)?;
        template.render(messages, &ChatOptions::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_template_as_models_have_them() {
        let source = "{{ bos_token }}{% for message in messages %}\n    {%- if loop.first and message.role == 'system' %}\n\
                      [{{ message['content'].strip().upper() }}]\n    {% else %}\n<{{ message.role }}>{{ message.content | trim }}</>\n\
                      {% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        let text = render(source, &[said("system", " short "), said("user", "Hi ")]).unwrap();
        assert_eq!(text, "<s>[SHORT]\n<user>Hi</>\n<assistant>");
    }

    #[test]
    fn python_spells_its_values_in_its_own_way() {
        let messages = [said("user", "<é & 'x'>")];
        assert_eq!(render("{{ none }} {{ true }} {{ undefined_name }}|", &messages).unwrap(), "None True |");
        let json = render("{{ messages | tojson }}", &messages).unwrap();
        assert_eq!(json, r#"[{"role": "user", "content": "<é & 'x'>"}]"#);
        assert_eq!(render("{{ {'a': [1]} | tojson(indent=2) }}", &messages).unwrap(), "{\n  \"a\": [\n    1\n  ]\n}");
    }

    #[test]
    fn a_template_that_does_not_end_is_an_error() {
        let endless = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}";
        let error = render(endless, &[said("user", "x")]).unwrap_err();
        assert!(error.contains("more than 10000000 steps"), "{error}");
        let long: Vec<ChatMessage> = (0..16_384).map(|_| said("user", "x")).collect();
        let source = "{% for message in messages %}{% if message.role == 'user' %}{{ message.content | trim }}{% endif %}{% endfor %}";
        assert_eq!(render(source, &long).unwrap().len(), long.len());
    }

    #[test]
    fn a_refusal_keeps_the_templates_words_and_a_broken_template_its_line() {
        let refusal = render("{{ raise_exception('roles must alternate') }}", &[said("user", "x")]).unwrap_err();
        assert!(refusal.ends_with("these messages: roles must alternate"), "{refusal}");
        assert!(render("{% for %}", &[]).unwrap_err().contains("line 1"));
        assert!(render("{{ messages[0].content.nonsense() }}", &[said("user", "x")]).unwrap_err().contains("line 1"));
    }

    #[test]
    fn variables_of_a_request_reach_the_template_but_cannot_replace_its_own() {
        let template = JinjaTemplate::new(
            "{{ mood }}{{ bos_token }}{{ messages | length }}".to_owned(),
            BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]),
        )
        .unwrap();
        let mut options = ChatOptions::default();
        for (name, value) in [("mood", "calm"), ("bos_token", "forged"), ("messages", "forged")] {
            options.variables.insert(name.to_owned(), value.into());
        }
        assert_eq!(template.render(&[said("user", "x")], &options).unwrap(), "calm<s>1");
    }

    #[test]
    fn the_plain_form_is_a_line_for_each_turn() {
        let messages = [said("system", "Be brief."), said("user", "Hello!")];
        assert_eq!(plain(&messages, true), "system: Be brief.\nuser: Hello!\nassistant:");
        assert_eq!(plain(&messages[1..], false), "user: Hello!\n");
    }
}
