"""Every bound of the service in one place."""

MIB = 1 << 20

# Session frames (rule S8).
MAX_FRAME_BYTES = MIB
MAX_FRAME_TOKENS = 16_384
TOKENIZER_CHUNK_BYTES = 512 * 1024
MAX_END_MESSAGE_BYTES = 512
# Unfinished input of a Session: groups, their records, and the tokens of prompts whose last Extend is missing.
MAX_OPEN_GROUPS = 64
MAX_ASSEMBLING_BYTES = 128 * MIB
MAX_ASSEMBLING_TOKENS = 1 << 24
# Bytes of unfinished groups of all Sessions of a worker. Beyond it, Sessions with over half an equal share are closed.
MAX_ALL_ASSEMBLING_BYTES = 256 * MIB
# Sequences of one router: on their way in, running, and ended ones that have not gone out.
MAX_ROUTER_SEQS = 1 << 16
MAX_ROUTERS = 4096
# Sessions whose Hello has not arrived: one more ends the oldest.
MAX_UNOPENED_SESSIONS = 256
# Ended sequences that a worker keeps per router after they were sent, in case the frame is lost.
MAX_TAILS = 1024
MAX_TAIL_TOKENS = 1 << 18
# Tokens of a live sequence whose logprobs and digests a worker keeps after they were sent, for the same case.
MAX_SENT_LOGPROBS = 1 << 10
# Sequences that outlive their router (S12): names of them in one frame; most that a router remembers; how long a
# request that resumes a broken stream waits until the worker has named its sequence.
MAX_ORPHANS_PER_FRAME = 8192
MAX_ORPHANS = 1 << 16
ORPHAN_WAIT_S = 0.05
MAX_ADOPTION_KEY_BYTES = 32
MIN_LEASE_S = 0.1
MAX_LEASE_S = 60.0

# Limits of a request.
MAX_REQUEST_BYTES = 16 * MIB
MAX_PROMPT_TEXT_BYTES = 8 * MIB
MAX_REQUEST_ID_BYTES = 128
MAX_SESSION_ID_BYTES = 128
MAX_CACHE_SALT_BYTES = 128
# Answers to one request.
MAX_ANSWERS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_TOKEN_SEQUENCES = 16
MAX_STOP_TOKEN_SEQUENCE = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
# One of each byte, and of the blank before it.
MAX_BAD_WORD_TOKENS = MAX_BAD_WORD_BYTES + 1
MAX_ALLOWED_TOKEN_IDS = 4096
# Bytes of a constraint, from clients and to workers: as much as the compiler's stack has room for.
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024
# Results of checked constraints that a router keeps, by tokenizer: how many, and their bytes together.
MAX_CHECKED_GRAMMARS = 256
MAX_CHECKED_GRAMMAR_BYTES = 8 * MIB
# Compiled grammars that a worker keeps, and bytes of these plus those in use.
MAX_COMPILED_GRAMMARS = 128
MAX_GRAMMARS_BYTES = 512 * MIB
# Most likely tokens beside each logprob, and further ids whose logprobs are asked for.
MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
# Drafts of a sequence and step, and newest tokens that a lookup of them compares.
MAX_SPECULATIVE_TOKENS = 16
# Tokens of finished answers that a worker may keep, 4 bytes each.
MAX_FINISHED_TOKENS = 1 << 28
# Text that grammars force: drafts of it per sequence and step, bytes of it examined for these, and texts whose tokens a
# worker keeps.
MOST_FORCED = 16
MAX_FORCED_TEXT_BYTES = 128
MAX_FORCED_TEXTS = 1024
# Steps of an engine that its flight recorder keeps, and sequences of all of them together (45 bytes each).
MAX_STEP_RECORDS = 4096
MAX_STEP_RECORD_ROWS = 1 << 17
# Sequences of all steps in one response of ListSteps, which takes the event loop 10 ms.
MAX_LISTED_STEP_ROWS = 4096
# Dumps of steps: sequences of all steps in one (about 4 MB), dumps that a worker keeps, how long it waits for one to be
# written, and how often it looks whether a step hangs.
MAX_DUMPED_STEP_ROWS = 32_768
MAX_STEP_DUMPS = 8
STEP_DUMP_WAIT_S = 5.0
STEP_WATCH_S = 0.5
# Of one call of Score.
MAX_CONTINUATIONS = 128
# Of one call of Embed: texts, and numbers in all, which are four bytes each of one message of less than 4 MiB.
MAX_EMBED_INPUTS = 2048
MAX_EMBED_NUMBERS = 1_000_000
# Of one call of Rerank.
MAX_DOCUMENTS = 1024
# Prompts of one call that are in the queue or on workers at a time.
MAX_PROMPTS_AT_ONCE = 256
# Entries of logprobs in one message to a client: with all of the above they have less than a megabyte.
MAX_MESSAGE_LOGPROBS = 1024
MAX_CHAT_MESSAGES = 4096
MAX_TOOLS = 256
MAX_TEMPLATE_ARGUMENT_BYTES = 64 * 1024
# Most tokens of a KV block and of a sequence that a worker may announce.
MAX_BLOCK_TOKENS = 1 << 16
MAX_MODEL_LEN = 1 << 30
# Levels of JSON in a field: rendering takes one of Python's 1,000 frames for each level.
MAX_JSON_LEVELS = 500
# Entries of any list of messages: each is looked at in Python, which takes microseconds.
MAX_LIST_ENTRIES = 65_536
MAX_TEMPLATE_S = 2.0

# Connections. Of each: calls at a time, metadata of a call; how long TLS and HTTP/2 may take to begin.
MAX_STREAMS_PER_CONNECTION = 4096
# Of each, beside those: calls whose status has gone out and that are not freed yet. A client with 4,096 calls begins
# the next one when a status comes, and gRPC would refuse it until the event loop has freed the call that ended.
MAX_UNFREED_STREAMS_PER_CONNECTION = 4096
MAX_METADATA_BYTES = 16 * 1024
HANDSHAKE_TIMEOUT_S = 10.0
# New calls that the event loop has not taken yet, of all connections of a port, about 28 KB each. From the first number
# on gRPC drops some at random, from the second on all, with CANCELLED and no reason. The first number holds all that
# one connection may begin and free (above). The second is 336 MB, of the 1 GiB that the manifest gives a router.
MAX_UNACCEPTED_CALLS = 10_000
MAX_UNACCEPTED_CALLS_HARD = 12_000
# Seconds after which gRPC drops a call that still waits: longer than any client does.
MAX_UNACCEPTED_S = 3600
# Calls whose message has not arrived: one more ends the oldest. At 6,000 new calls a second a message has 0.7 s.
MAX_UNREAD_CALLS = 4096
# The same of ports beside the main one (admin, health), whose callers are few: 56 and 112 MB.
MAX_SIDE_STREAMS_PER_CONNECTION = 128
MAX_SIDE_UNACCEPTED_CALLS = 2000
MAX_SIDE_UNACCEPTED_CALLS_HARD = 4000
MAX_SIDE_UNREAD_CALLS = 512
# Requests of one ModelStreamInfer that run at a time; later ones stay unread.
MAX_STREAM_ITEMS = 256
# Health: watches of one process (one more ends the oldest), characters of a service's name, and bytes of a message to a
# port that has health alone.
MAX_HEALTH_WATCHES = 512
MAX_SERVICE_NAME_CHARS = 256
MAX_HEALTH_MESSAGE_BYTES = 4096
# Log lines of calls that were refused before their request was understood: at once, and per second. Others are
# counted in one line a second.
MAX_REFUSAL_LINES = 1000
REFUSAL_LINES_PER_S = 100
# A connection without calls is closed after this time.
CONNECTION_IDLE_S = 300.0
# How long a call's message may take to come.
REQUEST_READ_TIMEOUT_S = 60.0
# Of the descriptors that a process may have: those that connections of callers never get, at least so many and this
# share. Of each port beside the main one: most connections.
RESERVED_DESCRIPTORS = 128
RESERVED_DESCRIPTORS_SHARE = 8
MAX_SIDE_CONNECTIONS = 128
# Fewer are worth a warning at the start.
FEW_DESCRIPTORS = 4096

# Bytes of a secret's file, of a file of API keys, and of a certificate's, a key's or a CA's.
MAX_SECRET_BYTES = 4096
MAX_KEY_FILE_BYTES = 4 * MIB
MAX_PEM_BYTES = 4 * MIB
# API keys, and how soon a change of their file counts.
MAX_API_KEYS = 4096
KEY_FILE_LOOK_S = 1.0

# Limits of a router.
MAX_QUEUED_REQUESTS = 4096
MIN_QUEUE_RETRY_S = 0.05
MAX_QUEUE_RETRY_S = 30.0
MAX_TENANTS = 4096
# A class that has waited for so long goes before higher ones, with at most this share of the tokens while those wait.
PROMOTE_AFTER_S = 5.0
PROMOTED_SHARE = 0.125
# Shares of tenants: prompt tokens that an output token counts as, and how often output is charged at most: of so many
# running requests in one turn of the loop.
OUTPUT_TOKEN_COST = 2.0
CHARGE_OUTPUT_S = 0.1
CHARGED_PER_TURN = 256
MAX_SESSIONS = 65_536
# Waiting requests whose lane is looked at again, and how often at most; and when a worker is idle meanwhile.
MAX_REPLACED_REQUESTS = 256
REPLACE_S = 0.02
REPLACE_IDLE_S = 0.1
# Granules of the prefix index, per model, 24 bytes each.
MAX_INDEX_ENTRIES = 1 << 22
# Time for which a sent prompt counts as cached before the worker reports it.
EXPECTED_S = 2.0
MAX_EXPECTED_GRANULES = 1 << 17
MAX_TENANT_BYTES = 128
MAX_UNREAD_TOKENS = 65_536
# A client that lets a message wait for so long is dropped, seconds.
SLOW_CLIENT_TIMEOUT_S = 30.0
# Answers that wait to be audited; further ones are not audited. Longest time of one audit, seconds.
MAX_AUDITS_WAITING = 64
AUDIT_TIMEOUT_S = 900.0
# Finished requests that are kept for when workers differ on a KV block: how many, and how many tokens they may have
# together. Longest wait for the digest of a block that a worker has been made to compute, seconds.
MAX_RECENT_REQUESTS = 256
MAX_RECENT_TOKENS = 1 << 20
KV_DIGEST_WAIT_S = 10.0
MAX_HOLD_S = 0.25
MAX_TOKENIZER_BYTES = 256 * MIB
# Bytes of a checkpoint's files: a JSON configuration file; the index or header that names each tensor.
MAX_CONFIG_FILE_BYTES = 16 * MIB
MAX_WEIGHT_INDEX_BYTES = 100 * MIB
# Of a GGUF file: header, values or tensors, items of an array, vocabulary, token. Published headers have up to 30 MB.
MAX_GGUF_HEADER_BYTES = 128 * MIB
MAX_GGUF_ENTRIES = 1 << 16
MAX_GGUF_ITEMS = 1 << 21
MAX_GGUF_VOCABULARY_BYTES = 8 * MIB
MAX_GGUF_TOKEN_BYTES = 1024
# Token ids are below this number; published vocabularies have at most 901,629 tokens.
MAX_TOKEN_IDS = 1 << 20
# Most layers, experts of a layer and of all layers, which config.json alone sets. Published: 130, 512 and 25,000.
MAX_MODEL_LAYERS = 1024
MAX_MODEL_EXPERTS = 2048
MAX_ALL_EXPERTS = 1 << 16
# Bytes of a configuration file of options, and its values with aliases written out.
MAX_OPTIONS_FILE_BYTES = MIB
MAX_OPTIONS_VALUES = 100_000
TOKENIZER_TIMEOUT_S = 30.0
TOKENIZE_THREADS = 2
REDIAL_S = 0.25
# The interval grows by this part of the time for which an address has failed, to the most of where nothing listens, and
# of where a process says that it does not serve; each differs by up to this part.
REDIAL_GROWTH = 0.05
MAX_REDIAL_S = 5.0
MAX_REDIAL_UNREADY_S = 1.0
REDIAL_JITTER = 0.2
# A worker that has died this young so often in a row is on probation: for so long, twice as long each time, it gets no
# more requests at a time than these.
SHORT_LIFE_S = 60.0
SHORT_LIVES = 2
PROBATION_S = 10.0
MAX_PROBATION_S = 60.0
PROBATION_SEQS = 2
# Discovery. DNS is asked again after its time to live, within these bounds; at once when a worker is lost.
DNS_MIN_REFRESH_S = 0.5
DNS_MAX_REFRESH_S = 10.0
DNS_TIMEOUT_S = 3.0
# Time without addresses after which a name counts as empty; addresses may return earlier.
DNS_EMPTY_S = 600.0
WORKER_LIST_POLL_S = 0.5
MAX_WORKER_LIST_BYTES = MIB

# How old a router's figures, and the text that scrapers get, are at most; and how long a reader waits for a busy loop.
FIGURES_EVERY_S = SCRAPE_EVERY_S = 0.1
FIGURES_WAIT_S = 1.0
# Series of one metric: of a histogram, beyond which new ones are dropped; and of a gauge that OTLP exports.
MAX_HISTOGRAM_SERIES = 2000
MAX_EXPORTED_SERIES = 1 << 14
# How long the lost attempts of a worker stay in the metrics after it has left, so that scrapers see them.
LOST_SERIES_S = 600.0
# Engine steps in the trace of one request that asks for them (x-fissile-trace-steps): its newest.
MAX_TRACED_STEPS = 256
# Spans that wait until it is known whether their request was slow or failed (--trace-slow), about 2 KB each.
MAX_HELD_SPANS = 1 << 13
# The port for scrapers: connections (one more ends the one that has been quiet longest), bytes of a request, how long
# a request, TLS or the reading of an answer may take, and how long a connection may be idle between two requests.
MAX_SCRAPE_CONNECTIONS = 64
MAX_SCRAPE_REQUEST_BYTES = 16 * 1024
SCRAPE_TIMEOUT_S = 10.0
SCRAPE_IDLE_S = 150.0
# What a facade reads of the metrics of one router, and how long that may take.
MAX_SCRAPED_BYTES = 16 * MIB
SCRAPE_ROUTER_TIMEOUT_S = 2.0

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

# KV events (docs/explanation/architecture.md): the time between two frames of a Session, the changes in a frame, and
# the changes that a worker keeps for returning or slow routers. A router that needs older changes gets a snapshot.
KV_EVENTS_S = 0.05
MAX_KV_FRAME_CHANGES = 4096
MAX_KV_LOG = 1 << 16
# Digests of KV blocks that a worker remembers for routers that come, and that a router compares others with.
MAX_KV_DIGEST_LOG = 1 << 10
MAX_KV_DIGESTS = 1 << 15

# Failover. Consecutive attempts of a request without a token; all of its attempts; worker deaths that it may meet;
# and deaths within its first tokens, after which it runs alone for this time or number of tokens.
MAX_ATTEMPTS = 8
MAX_ATTEMPTS_IN_ALL = 64
MAX_DEATHS = 8
MAX_SUSPICIONS = 2
FIRST_TOKENS = 16
ALONE_S = 30.0
# How long a request waits for a worker when there is none for it.
WORKER_WAIT_S = 5.0

# A worker's stream of KV events to a router of another project: longest time without a report of the load, and the time
# over which rates are measured.
LOAD_HEARTBEAT_S = 1.0
THROUGHPUT_WINDOW_S = 2.0

# Direct calls that a worker takes beyond those that it can run at once.
MAX_WAITING_CALLS = 4096
# Ids of ended requests that a worker's doors keep, to tell an abort that is late from one of an unknown id.
MAX_ENDED_IDS = 16_384
# Engine. In steps that mix prompts and decodes, prompts get at least this share of the tokens.
PREFILL_SHARE = 0.125
MAX_CACHE_SALTS = 4096
MAX_KV_BLOCKS = 1 << 20

# Ranks of a tensor-parallel worker. A rank that is silent for so many heartbeats is given up; while it loads, Python
# may be inside of one call for long.
RANK_HEARTBEAT_S = 0.5
RANK_MISSED_HEARTBEATS = 8
RANK_MISSED_HEARTBEATS_LOADING = 120
STEP_TIMEOUT_S = 30.0
# Time for a rank to end after it was asked to.
RANK_END_S = 2.0
MAX_RANK_FRAME_BYTES = 256 * MIB
# A host that is gone without a word, seconds.
RANK_TCP_TIMEOUT_S = 8.0
# Time until the name in --dist-init has an address, seconds.
RANK_NAME_S = 60.0
# Connections at --dist-init that have not proved to be a rank: how many, and bytes of the frame that proves it.
MAX_RANK_GUESTS = 64
MAX_HELLO_BYTES = 256

# Files of packed weights: bytes of all together, beyond which those go that are not in use, and how long a start
# waits for another that packs the same.
WEIGHTS_CACHE_BYTES = 64 << 30
WEIGHTS_CACHE_WAIT_S = 600.0

# Log lines and other text that waits to be written, and how long the end of a process waits for it.
MAX_OUTPUT_PIECES = 16_384
MAX_OUTPUT_BYTES = 4 * MIB
OUTPUT_DRAIN_S = 1.0

# A background task that failed starts again after this time, which grows up to the longest. It is reset after a run
# of this length without a failure.
TASK_RESTART_S = 0.1
TASK_RESTART_MAX_S = 10.0
TASK_FORGIVEN_S = 60.0

# Most bytes of the history file of `fissile chat`: about 10,000 lines. A longer file loses its older half.
MAX_CHAT_HISTORY_BYTES = MIB

# HTTP. A silent stream gets a comment after this time: proxies close connections that are silent for 30 s
# and more. Events of a request that may wait for a caller who does not read; further ones wait in the router.
SSE_PING_S = 10.0
MAX_BUFFERED_EVENTS = 256
# Connections of a facade; how long browsers keep the answer to whether a page may call.
MAX_HTTP_CONNECTIONS = 4096
# Chunks of a request's body with fewer bytes.
SMALL_CHUNK_BYTES = 64
MAX_SMALL_CHUNKS = 4096
# Bytes of all bodies that arrive at a facade at a time; beyond it the largest one is refused.
MAX_UPLOAD_BYTES = 256 * MIB
CORS_MAX_AGE_S = 600
# How long a facade waits for its routers' health, less than the chart's probe, and keeps it for further probes.
HEALTH_TIMEOUT_S = 2.0
HEALTH_KEPT_S = 1.0

# Shutdown. Between health's NOT_SERVING and the first refusal, balancers get time to learn of it.
DRAIN_PROPAGATION_S = 0.25
DRAIN_TIMEOUT_S = 30.0
# How long a router that ends waits until the statuses of its last calls have gone out, and when a client that has got
# nothing should ask again.
ROUTER_ENDING_S = 1.0
ROUTER_RETRY_S = 0.5
# Time to write the rest to routers when everything has ended.
SESSION_FLUSH_S = 1.0
# How long the process waits for the step or the load that the engine thread is in.
ENGINE_JOIN_S = 0.5
TELEMETRY_SHUTDOWN_S = 1.0
# Time in which a stopping server still accepts calls to refuse them with a status. A burst of 5,000 takes 3 to 5 s on
# two busy cores; an endless burst must not keep a server.
STOP_ACCEPTING_S = 10.0
# How long after the last call's end its status may take to go out.
STATUS_FLUSH_S = 1.0

# Texts in the router: bytes of those that wait for the tokenizer or are in it, and of a part that cannot be cut.
MAX_QUEUED_TEXT_BYTES = 64 * MIB
MAX_UNCUT_TEXT_BYTES = MIB
# Tokenizers whose places for cuts are kept.
MAX_KNOWN_CUTS = 64
# Largest answer of Tokenize or Detokenize, which clients accept without a setting; and largest text of Tokenize,
# whose answer has up to 11 bytes for each byte of the text.
MAX_TEXT_ANSWER_BYTES = 4 * MIB - 1024
MAX_TOKENIZE_TEXT_BYTES = 256 * 1024
# Characters and entries of all values that a chat template makes for one prompt.
MAX_TEMPLATE_WORK = 256 * MIB
