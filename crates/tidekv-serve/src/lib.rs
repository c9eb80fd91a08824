//! tidekv-serve SERVES: a small LLM engine whose KV cache lives in an elastic pool, behind an OpenAI-compatible API.
//!
//! ```text
//!    HTTP ──> api ──> tokenizer ──> handle ──> engine ──> compute ──> the pool's memory
//!             JSON,   text to ids,   the       one thread: who runs next,
//!             SSE     ids to text    seam      which blocks, which token
//!
//!   server     the address, and draining when told to stop
//!   access     who may ask: names, sites, the key; pages: the routes behind that check
//!   connections how many clients, and how slow they may be; body_budget what their requests may hold
//!   api        pages, requests, answers, metrics
//!   handle     what the two sides say to each other; neither knows more of the other
//!   tokenizer  text to ids and back, chat templates, stop strings
//!   config     everything an engine is told when it starts
//!   engine     who runs next, which blocks, which token
//!   compute    a step: the model's arithmetic, and attention over the pool's memory (the one place with `unsafe`)
//!   model      shapes and weights: Llama, Qwen2 and Qwen3 folders, or synthetic
//!   router     many models behind one address, whichever engines answer for them: knows none of the above but HTTP
//! ```
//!
//! The API side is asynchronous and may be waiting for thousands of clients; the engine side is one ordinary thread that
//! never waits for a client. Between them lie values and channels alone ([`handle`]), so each is tested without the other.

#![deny(unsafe_code)]

pub mod access;
pub mod api;
mod body_budget;
#[expect(unsafe_code, reason = "block ids become memory there, and nowhere else")]
pub mod compute;
pub mod config;
pub mod connections;
pub mod engine;
pub mod handle;
pub mod model;
pub mod pages;
pub mod router;
pub mod server;
pub mod tokenizer;
