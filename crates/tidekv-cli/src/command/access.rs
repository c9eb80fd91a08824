//! Who may ask a server: from arguments and variables to what `kvserve` and the router check.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, bail};
use rustix::fs::OFlags;
use tidekv_serve::access::{Access, AccessError, ApiKey, HostName, Origin};

use crate::cli::AccessArgs;

/// A key is one line.
const KEY_BYTES_MAX: u64 = 4096;

/// `key_variable` holds the key where no file is named. Names and origins count wherever they are given: in the arguments, in a variable,
/// or in a configuration that was read before.
pub(super) fn access(
    args: &AccessArgs,
    key_variable: &str,
    variable: impl Fn(&str) -> Option<String>,
    mut hosts: Vec<HostName>,
    mut origins: Vec<Origin>,
) -> anyhow::Result<Access> {
    if args.api_key.is_some() {
        bail!(
            "--api-key shows the key to all users of this machine, who can see arguments: put it into a file that only you can read and \
             give --api-key-file FILE, or set {key_variable}"
        );
    }
    let get = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
    let key = match (&args.api_key_file, get(key_variable)) {
        (Some(path), _) => Some(key_of(path).with_context(|| format!("--api-key-file {}", path.display()))?),
        (None, Some(text)) => {
            Some(ApiKey::new(&text).with_context(|| format!("{key_variable} is no key: {KEY_FORM}"))?)
        }
        (None, None) => None,
    };
    hosts.extend(list(&args.allowed_hosts, "--allowed-hosts")?);
    hosts.extend(list(get("KVCACHED_ALLOWED_HOSTS").as_slice(), "KVCACHED_ALLOWED_HOSTS")?);
    origins.extend(list(&args.allowed_origins, "--allowed-origins")?);
    origins.extend(list(get("KVCACHED_ALLOWED_ORIGINS").as_slice(), "KVCACHED_ALLOWED_ORIGINS")?);
    Ok(Access::new(key, hosts, origins))
}

const KEY_FORM: &str = "write one line of letters, digits and signs of ASCII";

fn key_of(path: &Path) -> anyhow::Result<ApiKey> {
    // A FIFO without a writer would hold us up for ever.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let about = file.metadata()?;
    if !about.is_file() {
        bail!("it is not a regular file");
    }
    if about.mode() & 0o077 != 0 {
        bail!("other users may read or change it (mode {:o}): chmod 600 it, and make a new key", about.mode() & 0o777);
    }
    let mut text = String::new();
    file.by_ref().take(KEY_BYTES_MAX).read_to_string(&mut text)?;
    ApiKey::new(&text).with_context(|| format!("there is no key in it: {KEY_FORM}"))
}

/// `["a", "b"]` as vLLM takes it, `a,b`, or one for each time.
fn list<T: FromStr<Err = AccessError>>(written: &[String], name: &str) -> anyhow::Result<Vec<T>> {
    let mut all = Vec::new();
    for text in written {
        if text.trim_start().starts_with('[') {
            let list: Vec<String> =
                serde_json::from_str(text).with_context(|| format!("{name} {text} is not a JSON list of texts"))?;
            all.extend(list);
        } else {
            all.extend(text.split(',').map(str::to_owned));
        }
    }
    all.iter().map(|text| text.parse().context(name.to_owned())).collect()
}
