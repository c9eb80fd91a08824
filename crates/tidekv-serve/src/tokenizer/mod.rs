//! Text to ids and back, as the model's folder says or byte by byte.
//!
//! ```text
//!   "Hello" ── encode ──> [9906]                       prompts; special tokens as tokenizer.json adds them
//!   messages ── chat ──> template ──> [27, 91, ...]    chats; the template writes its own special tokens
//!   [9906] ── TextStream ──> "Hello"                   answers, token by token: never half a character, none lost
//!          ── StopScanner ──> up to a stop string      wherever the borders of tokens lie
//! ```
//!
//! | file of the folder       | what is taken from it                                             | absent                    |
//! |--------------------------|--------------------------------------------------------------------|---------------------------|
//! | `tokenizer.json`         | the tokenizer                                                      | an error                  |
//! | `tokenizer_config.json`  | `chat_template`, `bos_token`, `eos_token` and their like           | no special tokens         |
//! | `chat_template.jinja`    | the chat template; wins over the one above                         | the plain form (`chat`)   |
//! | `generation_config.json` | `eos_token_id`, and `temperature` and `top_p` where a request has none | OpenAI's defaults: 1  |

mod bytes;
mod chat;
mod folder;
mod stop;
mod stream;

use std::path::{Path, PathBuf};

pub use chat::{ChatMessage, ChatOptions};
pub use stop::StopScanner;
pub use stream::TextStream;

use chat::ChatTemplate;

/// Why text and ids could not be turned into each other.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A file of the model's folder cannot be read.
    #[error("{} cannot be read: is the model's folder complete?", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file of the model's folder is not what its name says.
    #[error("{} cannot be used: {what}", path.display())]
    Malformed {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The tokenizer refused a text.
    #[error("the text cannot be tokenised: {what}")]
    Encode {
        /// What it said.
        what: String,
    },
    /// The chat template refused the messages, or is broken.
    #[error("the chat template does not take these messages: {what}")]
    Template {
        /// What it said.
        what: String,
    },
}

/// How tokens are chosen where a request does not say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// 0 for the likeliest token.
    pub temperature: f32,
    /// Above 0 and at most 1.
    pub top_p: f32,
}

impl Default for SamplingDefaults {
    /// OpenAI's.
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0 }
    }
}

/// A model's tokenizer, its chat template and the tokens that end its texts.
#[derive(Debug)]
pub struct Tokenizer {
    words: Words,
    chat: ChatTemplate,
    end_tokens: Vec<u32>,
    defaults: SamplingDefaults,
}

/// How ids are written as text.
#[derive(Debug)]
enum Words {
    /// Ids below 256 are bytes: [`bytes`].
    Bytes,
    /// `tokenizer.json`.
    Json(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// The tokenizer of synthetic models: ids 0 to 255 are bytes.
    pub fn bytes() -> Self {
        Self {
            words: Words::Bytes,
            chat: ChatTemplate::Markers,
            end_tokens: vec![bytes::END_OF_TEXT, bytes::END_OF_TURN],
            defaults: SamplingDefaults::default(),
        }
    }

    /// The tokenizer of a model's folder.
    ///
    /// # Errors
    /// [`TokenizerError::Read`] and [`TokenizerError::Malformed`] name the file.
    pub fn from_folder(folder: &Path) -> Result<Self, TokenizerError> {
        folder::read(folder)
    }

    /// The ids of a prompt, with the special tokens that the model expects around one.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_with(text, true)
    }

    /// The ids of a text, with or without the special tokens that the model expects around a prompt.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`].
    pub fn encode_with(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        match &self.words {
            Words::Bytes => {
                let start = add_special.then_some(bytes::START_OF_TEXT);
                Ok(start.into_iter().chain(text.bytes().map(u32::from)).collect())
            }
            Words::Json(json) => match json.encode_fast(text, add_special) {
                Ok(encoding) => Ok(encoding.get_ids().to_vec()),
                Err(error) => Err(TokenizerError::Encode { what: error.to_string() }),
            },
        }
    }

    /// The ids of a conversation, ready for the assistant's answer.
    ///
    /// # Errors
    /// [`TokenizerError::Template`] with what the template said, [`TokenizerError::Encode`].
    pub fn encode_chat(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<Vec<u32>, TokenizerError> {
        match &self.chat {
            ChatTemplate::Markers => Ok(bytes::chat(messages, options.add_generation_prompt)),
            ChatTemplate::Plain => self.encode_with(&chat::plain(messages, options.add_generation_prompt), true),
            ChatTemplate::Jinja(template) => self.encode_with(&template.render(messages, options)?, false),
        }
    }

    /// Whether special tokens are added to a conversation, beside those that its template writes.
    pub fn adds_special_to_chats(&self) -> bool {
        matches!(self.chat, ChatTemplate::Plain)
    }

    /// The text of ids that stand together; special tokens have none.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.words {
            Words::Bytes => {
                String::from_utf8_lossy(&ids.iter().copied().filter_map(bytes::byte).collect::<Vec<_>>()).into_owned()
            }
            // An id that the tokenizer does not know has no text either: vocabularies are padded.
            Words::Json(json) => json.decode(ids, true).unwrap_or_default(),
        }
    }

    /// One token as log-probabilities name it: its text, and its bytes. Special tokens are spelled out.
    pub fn token(&self, id: u32) -> (String, Vec<u8>) {
        match &self.words {
            Words::Bytes => match bytes::byte(id) {
                Some(byte) => (String::from_utf8_lossy(&[byte]).into_owned(), vec![byte]),
                None => (bytes::name(id).to_owned(), bytes::name(id).as_bytes().to_vec()),
            },
            Words::Json(json) => {
                let text = json.decode(&[id], false).unwrap_or_default();
                let bytes = text.as_bytes().to_vec();
                (text, bytes)
            }
        }
    }

    /// Tokens that end a text; empty when the folder names none.
    pub fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }

    /// How tokens are chosen where a request does not say.
    pub fn defaults(&self) -> SamplingDefaults {
        self.defaults
    }
}
