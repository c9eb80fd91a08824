//! Arguments of `kvserve`, spelled as `vllm serve` spells them.

use std::path::PathBuf;

use clap::{Parser, ValueHint};

use super::AccessArgs;

const EXAMPLES: &str = "\
Examples:
  kvserve                                     # synthetic:tiny on 127.0.0.1:8000: no download, no GPU
  kvserve Qwen/Qwen3-0.6B --port 8001         # from the local Hugging Face cache
  kvserve serve ./my-model --served-model-name chat --max-model-len 4096
  kvserve --kv static:512M                    # all memory held from the start, to compare with
  kvserve synthetic:llama-8b --backend cuda   # shares 95 % of the card with all other pools
  kvserve synthetic:llama-8b --backend cuda --kv-budget 40G
  curl localhost:8000/v1/completions -d '{\"prompt\": \"Hello\", \"max_tokens\": 16}'

A MODEL is synthetic:tiny or synthetic:small (with :SEED; on a GPU also qwen-0.5b, llama-1b and llama-8b), a folder with
config.json, *.safetensors and tokenizer.json, or a Hugging Face id that was downloaded before (HF_HOME, HF_HUB_CACHE).
ENABLE_KVCACHED=false without --kv holds the whole budget from the start. KVCACHED_HOST_BUDGET, KVCACHED_GPU_UTILIZATION,
KVCACHED_IPC_NAME, KVCACHED_MAX_CACHED_TOKENS, KVCACHED_PAGE_SIZE_MB and the variables of the reserve mean what they mean elsewhere. VLLM_API_KEY is the key
where --api-key-file names none. SIGTERM
and Ctrl-C let running requests end; a second one ends at once. Sizes are 1024-based: 512M, 1.5G.
Exit status: 0 told to stop and drained, 2 error: port taken, no key, model not found or incomplete.";

/// Serve a model with an OpenAI-compatible API, its KV cache in an elastic pool
#[derive(Debug, Parser)]
#[command(name = "kvserve", version, after_help = EXAMPLES)]
pub struct ServeCli {
    /// What to serve [default: synthetic:tiny]; the word "serve" before it is allowed
    #[arg(value_name = "MODEL", num_args = 0..=2)]
    pub words: Vec<String>,

    /// The same as MODEL
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,

    /// Address to listen on
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub host: String,

    /// Port to listen on; 0 for any free one, which is printed
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub port: u16,

    /// Who may ask.
    #[command(flatten)]
    pub access: AccessArgs,

    /// The model's name for clients [default: MODEL as written]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,

    /// Where KV memory comes from: elastic, static or static:SIZE [default: elastic]
    #[arg(long, value_name = "MODE")]
    pub kv: Option<String>,

    /// What all pools of the device may hold together [default: on the processor $KVCACHED_HOST_BUDGET, else what others gave,
    /// else what --gpu-memory-utilization leaves; there this server alone never takes more than 1G]
    #[arg(long, value_name = "SIZE")]
    pub kv_budget: Option<String>,

    /// Part of a GPU that weights, pools and other programs may fill together [default: $KVCACHED_GPU_UTILIZATION, else 0.95]
    #[arg(long, value_name = "PART", conflicts_with = "kv_budget")]
    pub gpu_memory_utilization: Option<f64>,

    /// Memory that comes and goes at once, for each layer and for K and V [default: $KVCACHED_PAGE_SIZE_MB, else chosen]
    #[arg(long, value_name = "SIZE")]
    pub kv_chunk: Option<String>,

    /// What computes: cpu, cuda (bf16), cuda:f32, or auto: the GPU if there is one
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub backend: String,

    /// Most sequences in one step
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_num_seqs: u32,

    /// Most tokens in one step: longer prompts are computed in several
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_num_batched_tokens: u32,

    /// Longest sequence, prompt and answer together [default: what the model was made for]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_model_len: Option<u32>,

    /// Most requests that wait for a place; further ones are told to come back later
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_num_waiting: u32,

    /// Most connections at once; who comes later waits to be accepted
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections: u32,

    /// What the bodies of requests may hold together while they are read, at least 16M; who comes later is told to come back
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    pub body_budget: String,

    /// Tokens in a block
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub block_size: u32,

    /// Threads that compute [default: as many as this process may run on]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,

    /// How long running requests may take to end when told to stop: seconds, or with a unit as in 500ms
    #[arg(long, value_name = "SEC", default_value = "30", allow_hyphen_values = true)]
    pub drain: String,

    /// Name of the pool, as kvctl shows it [default: $KVCACHED_IPC_NAME, else kvcached_kvserve_...]
    #[arg(long, value_name = "NAME")]
    pub pool_name: Option<String>,

    /// Folder of the shared files [default: $KVCACHED_RUNTIME_DIR, else /dev/shm]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}
