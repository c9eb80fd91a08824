//! Arguments of the servers, `kvserve` and `kvctl up`: who may ask.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// Who may ask a server.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessArgs {
    /// File with the key that clients send as "Authorization: Bearer KEY", which nobody else may read (chmod 600); a key is needed to
    /// listen beyond this machine [default: $VLLM_API_KEY of kvserve, $KVCACHED_WEB_API_KEY of kvctl up]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub api_key_file: Option<PathBuf>,

    /// Refused: other users of the machine can see arguments.
    #[arg(long, hide = true, num_args = 0.., value_name = "KEY")]
    pub api_key: Option<Vec<String>>,

    /// Further host names that the server answers to, repeated or as a JSON list; addresses, localhost and this machine's name need
    /// no mention [also: $KVCACHED_ALLOWED_HOSTS]
    #[arg(long, value_name = "NAME")]
    pub allowed_hosts: Vec<String>,

    /// Sites whose pages may ask, written `https://chat.example.com`, repeated or as a JSON list [also: $KVCACHED_ALLOWED_ORIGINS]
    #[arg(long, value_name = "ORIGIN")]
    pub allowed_origins: Vec<String>,
}
