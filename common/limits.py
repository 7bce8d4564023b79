"""Every bound of the service in one place (design-details section 8)."""

MIB = 1 << 20

# Session frames (rule S8).
MAX_FRAME_BYTES = MIB
MAX_FRAME_TOKENS = 16_384
TOKENIZER_CHUNK_BYTES = 512 * 1024
MAX_END_MESSAGE_BYTES = 512
# Tokens of prompts whose last Extend has not come, per Session.
MAX_ASSEMBLING_TOKENS = 1 << 24
# Ended sequences that a worker keeps per router after they were sent, in case the frame is lost.
MAX_TAILS = 1024
MAX_TAIL_TOKENS = 1 << 18
MIN_LEASE_S = 0.1
MAX_LEASE_S = 60.0

# Requests.
MAX_REQUEST_BYTES = 16 * MIB
MAX_PROMPT_TEXT_BYTES = 8 * MIB
MAX_REQUEST_ID_BYTES = 128
MAX_SESSION_ID_BYTES = 128
MAX_CACHE_SALT_BYTES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_TOKEN_SEQUENCES = 16
MAX_STOP_TOKEN_SEQUENCE = 64
MAX_CHAT_MESSAGES = 4096
MAX_TEMPLATE_ARGUMENT_BYTES = 64 * 1024
# Entries of any list of messages: each is looked at in Python, which takes microseconds.
MAX_LIST_ENTRIES = 65_536
MAX_TEMPLATE_S = 2.0

# Connections. Of each: calls at a time, metadata of a call; how long TLS and HTTP/2 may take to begin.
MAX_STREAMS_PER_CONNECTION = 4096
MAX_METADATA_BYTES = 16 * 1024
HANDSHAKE_TIMEOUT_S = 10.0

# API keys, and how soon a change of their file counts.
MAX_API_KEYS = 4096
KEY_FILE_LOOK_S = 1.0

# Router.
MAX_QUEUED_REQUESTS = 4096
MIN_QUEUE_RETRY_S = 0.05
MAX_QUEUE_RETRY_S = 30.0
MAX_TENANTS = 4096
# A class that has waited for so long goes before higher ones, with at most this share of the tokens while those wait.
PROMOTE_AFTER_S = 5.0
PROMOTED_SHARE = 0.125
MAX_SESSIONS = 65_536
# Waiting requests whose lane is looked at again, and how often at most; and when a worker is idle meanwhile.
MAX_REPLACED_REQUESTS = 256
REPLACE_S = 0.02
REPLACE_IDLE_S = 0.1
# Of the prefix index, per model, 24 bytes each.
MAX_INDEX_ENTRIES = 1 << 22
# What has been sent counts as cached for so long before the worker says so.
EXPECTED_S = 2.0
MAX_EXPECTED_GRANULES = 1 << 17
MAX_TENANT_BYTES = 128
MAX_UNREAD_TOKENS = 65_536
MAX_HOLD_S = 0.25
MAX_TOKENIZER_BYTES = 256 * MIB
TOKENIZER_TIMEOUT_S = 30.0
TOKENIZE_THREADS = 2
REDIAL_S = 0.25
# Discovery. DNS is asked again after its time to live, within these bounds; at once when a worker is lost.
DNS_MIN_REFRESH_S = 0.5
DNS_MAX_REFRESH_S = 10.0
DNS_TIMEOUT_S = 3.0
WORKER_LIST_POLL_S = 0.5
MAX_WORKER_LIST_BYTES = MIB

# How often a router takes its figures for the metrics.
FIGURES_EVERY_S = 0.5

# AdminService.
MIN_WATCH_INTERVAL_S = 0.1
MAX_LOAD_WATCHES = 64
FLUSH_TIMEOUT_S = 30.0

# Session timing (rules S6, S10).
LEASE_S = 5.0
HEARTBEAT_S = 0.5
MISSED_HEARTBEATS = 3
CONNECT_TIMEOUT_S = 1.0
# A stream that breaks is taken up again within this time, or its requests go on elsewhere (rule S7).
RECONNECT_S = 1.0
# A step is stalled when it takes longer than this, and than so many of the longest prefill steps.
STALL_TIMEOUT_S = 30.0
STALL_PREFILLS = 10
# A Session that broke the protocol is taken up again once in this time.
VIOLATION_MEMORY_S = 10.0
SESSION_GOODBYE_S = 0.25

# KV events (design-details section 2): the time between two frames of a Session, the changes that a frame brings, and
# those that a worker remembers for routers that come back or are slow. Who needs older ones gets a snapshot.
KV_EVENTS_S = 0.05
MAX_KV_FRAME_CHANGES = 4096
MAX_KV_LOG = 1 << 16

# Failover. Workers that a request may be given to, and workers that may die with it.
MAX_ATTEMPTS = 8
MAX_DEATHS = 2
# How long a request waits for a worker when there is none for it.
WORKER_WAIT_S = 5.0

# Engine.
MAX_CACHE_SALTS = 4096
MAX_KV_BLOCKS = 1 << 20

# Ranks of a tensor-parallel worker. A rank that is silent for so many heartbeats is given up; while it loads, Python
# may be inside of one call for long.
RANK_HEARTBEAT_S = 0.5
RANK_MISSED_HEARTBEATS = 8
RANK_MISSED_HEARTBEATS_LOADING = 120
STEP_TIMEOUT_S = 30.0
# How long a rank may take to end by itself.
RANK_END_S = 2.0
MAX_RANK_FRAME_BYTES = 256 * MIB
# A host that is gone without a word, seconds.
RANK_TCP_TIMEOUT_S = 8.0

# Files of packed weights: bytes of all together, beyond which those go that are not in use, and how long a start
# waits for another that packs the same.
WEIGHTS_CACHE_BYTES = 64 << 30
WEIGHTS_CACHE_WAIT_S = 600.0

# Shutdown. Between health's NOT_SERVING and the first refusal, balancers get time to learn of it.
DRAIN_PROPAGATION_S = 0.25
DRAIN_TIMEOUT_S = 30.0
# What is left to write to routers when everything has ended.
SESSION_FLUSH_S = 1.0
# How long the process waits for the step or the load that the engine thread is in.
ENGINE_JOIN_S = 0.5
TELEMETRY_SHUTDOWN_S = 1.0
