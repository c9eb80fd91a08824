//! The byte tokenizer of synthetic models: nothing to download, every text has ids, every byte has one.
//!
//! ```text
//!   0 ..= 255   the byte itself
//!   256         start of text, before every prompt
//!   257         end of text
//!   258, 259    start and end of a turn in a chat:   256 | 258 user \n Hello! 259 | 258 assistant \n
//! ```
//!
//! Text never becomes a special token, so a message cannot pretend to be another turn.

use super::ChatMessage;

pub(super) const START_OF_TEXT: u32 = 256;
pub(super) const END_OF_TEXT: u32 = 257;
pub(super) const START_OF_TURN: u32 = 258;
pub(super) const END_OF_TURN: u32 = 259;

/// The byte that an id is, unless it is special.
pub(super) fn byte(id: u32) -> Option<u8> {
    u8::try_from(id).ok()
}

/// What a special token is called.
pub(super) fn name(id: u32) -> &'static str {
    match id {
        START_OF_TEXT => "<|start|>",
        END_OF_TEXT => "<|end|>",
        START_OF_TURN => "<|turn|>",
        END_OF_TURN => "<|end_of_turn|>",
        _ => "",
    }
}

/// A conversation, with the beginning of the assistant's turn where its answer is wanted.
pub(super) fn chat(messages: &[ChatMessage], add_generation_prompt: bool) -> Vec<u32> {
    let mut ids = vec![START_OF_TEXT];
    let mut open = |role: &str, content: Option<&str>| {
        ids.push(START_OF_TURN);
        ids.extend(role.bytes().chain([b'\n']).map(u32::from));
        if let Some(content) = content {
            ids.extend(content.bytes().map(u32::from));
            ids.push(END_OF_TURN);
        }
    };
    for message in messages {
        open(&message.role, Some(&message.content));
    }
    if add_generation_prompt {
        open("assistant", None);
    }
    ids
}
