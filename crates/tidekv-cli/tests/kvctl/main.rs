//! `kvctl` as operators run it: the real binary on a folder of its own, with pools that live in this process, pools of
//! kvcached's own made by hand, and pools whose owner was killed.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod common;
mod tmux;

mod arena;
mod budget;
mod cli;
mod delete;
mod doctor;
mod events;
mod gc;
mod generate;
mod kvcached;
mod limit;
mod list;
mod share;
mod shell;
mod strangers;
mod top;
mod trim;
mod watch;
