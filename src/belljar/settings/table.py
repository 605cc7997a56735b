"""The table of all settings, which the code, `belljar config` and the reference page read.

This module does not know where values come from or how settings are used.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from belljar.settings import kinds
from belljar.settings.azure import DEFAULT_SCOPE, checked_endpoint, checked_part, checked_region
from belljar.settings.environments import EnvironmentEntry, checked_names
from belljar.settings.keys import LOCAL_PRINCIPAL, checked_key, parse_key
from belljar.settings.sandboxes import OWN, checked_sandbox
from belljar.settings.sources import ENV_FILE, LayeredSettings

MEBIBYTE = 1024 * 1024
"""The bytes of one unit of a setting or a limit whose name ends in `_mb`."""


class Settings(LayeredSettings):
    """All settings. `Settings(**flags)` reads every source; prefer `load_settings`, whose errors name the source."""

    sandbox: Annotated[str, AfterValidator(checked_sandbox)] = Field(
        "namespace",
        description="How sessions are sealed off: Linux namespaces, containers of docker or podman, gVisor's own "
        "kernel, virtual machines of microsandbox, plain processes that isolate nothing, or a provider that an "
        "installed package (by its name) or a plugin (as `plugin:NAME`) brings.",
        json_schema_extra={
            "allowed": f"{' or '.join(map(json.dumps, OWN))}, the name of an installed provider, or `plugin:NAME`"
        },
    )
    runsc: str = Field("runsc", description="gVisor's program for the `gvisor` sandbox: a name on the PATH, or a path.")
    container_engine: Literal["auto", "podman", "docker"] = Field(
        "auto", description="What makes the containers of the `container` sandbox: `auto` takes the first that answers."
    )
    container_image: Annotated[str, AfterValidator(kinds.checked_image)] = Field(
        "belljar:latest",
        description="The image of those containers, a Linux with glibc; it has to be there, nothing is ever pulled.",
        json_schema_extra={"allowed": "the name of an image"},
    )
    environment: str = Field(
        "default",
        description="Where the code of sessions runs: `default` (the managed science environment), a name of "
        "`environments`, the path of a virtual environment or interpreter, `kernel:NAME` for an installed Jupyter "
        "kernel, or `azure` for a session pool of Azure.",
    )
    environments: Annotated[dict[str, EnvironmentEntry], AfterValidator(checked_names)] = Field(
        {},
        description="Environments that a session may ask for by name, a table each: its `kind` (`venv`, `venv-uv`, "
        "`conda`, `system` or `managed`) and its `path`; for a managed one `requirements` or a `file`, and `python`; "
        "for one of conda that belljar makes, its `file`; `gpus` for its own choice of GPUs.",
        json_schema_extra={"allowed": "tables, as in `[environments.NAME]`; in the variable, JSON"},
    )
    conda_channels: list[Annotated[str, AfterValidator(kinds.checked_channel)]] = Field(
        [],
        description="Conda's channels for packages of sessions in environments of conda, names (looked for below "
        "`CONDA_CHANNEL_ALIAS`), URLs or folders; without any, those that an environment's own packages came from.",
        json_schema_extra={"allowed": "a list, like `conda-forge, https://mirror.example.com/bioconda`"},
    )
    azure_endpoint: Annotated[str, AfterValidator(checked_endpoint)] = Field(
        "",
        description="The session pool in which sessions of the environment `azure` live: its management endpoint, or "
        "the address of another belljar that serves the `foundry` surface.",
        json_schema_extra={"allowed": "an https: URL, an http: URL on this machine, or empty text"},
    )
    azure_scope: str = Field(DEFAULT_SCOPE, description="The scope of the tokens sent to it, by `azure-identity`.")
    azure_key: SecretStr = Field(
        SecretStr(""),
        description="A key that is sent to it instead of a token, for an endpoint that takes keys: another belljar's; "
        "a file may not hold it.",
    )
    azure_subscription: Annotated[str, AfterValidator(checked_part)] = Field(
        "",
        description="Four names that stand for `azure_endpoint` together, the subscription's id among them; "
        "`AZURE_SUBSCRIPTION_ID` works too.",
    )
    azure_resource_group: Annotated[str, AfterValidator(checked_part)] = Field(
        "", description="The pool's resource group; `AZURE_RESOURCE_GROUP` works too."
    )
    azure_session_pool: Annotated[str, AfterValidator(checked_part)] = Field(
        "", description="The pool's name; `AZURE_SESSION_POOL` works too."
    )
    azure_region: Annotated[str, AfterValidator(checked_region)] = Field(
        "", description="The pool's region, such as `westus2`; `AZURE_REGION` works too."
    )
    data_directory: kinds.Directory = Field(
        default_factory=kinds.user_data,
        description="Where sessions, their files and managed environments are kept.",
        json_schema_extra={"default": "`belljar` in the user's data folder (Linux: `~/.local/share/belljar`)"},
    )
    download_directory: kinds.Directory = Field(
        default_factory=kinds.user_downloads,
        description="Where `download_file` saves what it is asked to save; `AZURE_DOWNLOAD_DIRECTORY` works too.",
        json_schema_extra={"default": "`belljar` in the user's downloads folder (`~/Downloads/belljar`)"},
    )
    folders: Annotated[dict[str, kinds.FolderSetting], AfterValidator(kinds.checked_folders)] = Field(
        {},
        description="Folders of this machine that sessions see at `/mnt/NAME`: a path, which is read-only, or a table "
        "with `path`, `writable` and `owners` (the names of the keys whose sessions see it; without it, all do).",
        json_schema_extra={
            "allowed": 'paths or tables, as in `folders = {sales = "/srv/sales", out = {path = "/srv/out", '
            "writable = true}}`; in the variable, JSON"
        },
    )
    workspace: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether sessions have a folder `workspace/` whose files their owner finds in every later session: "
        "`auto` means where tools of other servers or workflows are configured, or `workspace_directory` is set.",
    )
    workspace_directory: Annotated[str, AfterValidator(kinds.absolute_file)] = Field(
        "",
        description="Where those files are kept, a folder for each owner; `WORKSPACE_DIR` works too.",
        json_schema_extra={"default": "`workspaces` in the data directory", "allowed": "the path of a folder"},
    )
    workspace_mb: int = Field(
        512, ge=1, description="What one owner may keep in `workspace/`; what goes beyond it stays in its session."
    )
    surfaces: Annotated[
        list[Literal["interpreter", "toolbox", "executor", "azure-mcp", "foundry"]], AfterValidator(kinds.unmixed)
    ] = Field(
        ["interpreter"],
        min_length=1,
        description="The sets of tools that clients see: `interpreter` has all that sessions can do, `toolbox` only "
        "what it takes to find and call the tools of other MCP servers, `executor` runs code files, each in a fresh "
        "process, and is served alone; `azure-mcp` has the four tools of the Azure code interpreter's MCP server, "
        "`foundry` those of Azure's dynamic sessions and, over HTTP, their REST data plane.",
    )
    env_file: str = Field(
        ENV_FILE,
        description="A file of `NAME=value` lines that every command of belljar reads as variables of its own, never "
        "over what is set and never for sessions: the one in the working directory once you trust it (`belljar trust "
        ".env`), one that you name here at once.",
        json_schema_extra={"allowed": "the path of a file, or empty text"},
    )
    mcp_config: Annotated[str, AfterValidator(kinds.absolute_file)] = Field(
        "",
        description="The file that lists the MCP servers of the toolbox: `mcpServers` as Claude Desktop and Cursor "
        "have it, or VS Code's `servers`.",
        json_schema_extra={"allowed": "the path of a JSON file, or empty text"},
    )
    mcp_servers: dict[str, Any] = Field(
        {},
        description="More of them, as tables in the file of settings: `[mcp_servers.NAME]` with `command` and `args`, "
        "or with `url`.",
        json_schema_extra={"allowed": "tables like [mcp_servers.NAME]"},
    )
    servers_directory: Annotated[str, AfterValidator(kinds.absolute_file)] = Field(
        "",
        description="The folder in which `trees` is made, and nothing else touched, for the Python files of their "
        "tools while the server runs; `SERVERS_DIR` works too.",
        json_schema_extra={"default": "`toolbox` in the data directory", "allowed": "the path of a folder"},
    )
    skills_directory: Annotated[str, AfterValidator(kinds.absolute_file)] = Field(
        "",
        description="A folder of skills, folders of the Agent Skills format or Python files, that every session can "
        "read under `skills/` and import as `skills`, and cannot change; `SKILLS_DIR` works too.",
        json_schema_extra={"allowed": "the path of a folder, or empty text"},
    )
    skills: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether agents can save skills for their owner's later sessions: `auto` means where "
        "`skills_directory` is set, or tools of other servers are configured.",
    )
    skills_review: bool = Field(
        False,
        description="Whether a person has to approve a saved skill (`belljar skills approve`) before other sessions "
        "than the one that saved it see it.",
    )
    skills_mb: int = Field(256, ge=1, description="What one owner's saved skills may take, all kept versions included.")
    plugins_directory: Annotated[str, AfterValidator(kinds.absolute_file)] = Field(
        "",
        description="A folder of plugins, one Python file each, that run in the server with all its rights; plugins of "
        "installed packages are found by themselves.",
        json_schema_extra={"allowed": "the path of a folder, or empty text"},
    )
    workflows: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether clients see the tools `run_workflow` and `list_workflows`: `auto` means where "
        "`workflows_directory` is set.",
    )
    workflows_directory: Annotated[str, AfterValidator(kinds.absolute_file)] = Field(
        "",
        description="A folder of workflows (`NAME.yaml`, `.yml` or `.json`) that clients and `belljar workflow` can "
        "run by their names.",
        json_schema_extra={"allowed": "the path of a folder, or empty text"},
    )
    workflow_hold_s: kinds.Seconds = Field(
        60,
        description="How long a run of a workflow that waits for a person keeps its session's process; then the "
        "session sleeps on disk, where `hibernate` is on, and is woken by the answer.",
    )
    upstream_start_s: kinds.Seconds = Field(
        60, description="How long an MCP server of the toolbox may take to start and to list its tools."
    )
    upstream_wait_s: kinds.Seconds = Field(
        30,
        description="How long a cell waits for an MCP server of the toolbox that it uses and that is still connecting, "
        "before the code is told so; the server goes on connecting.",
    )
    upstream_silence_s: kinds.Seconds = Field(
        300,
        description="A call to an MCP server of the toolbox that says nothing for this long, not even progress, is "
        "given up; the time that a person takes to answer does not count.",
    )
    upstream_message_mb: int = Field(
        64, ge=1, le=1_024, description="The largest message that an MCP server of the toolbox may send."
    )
    upstream_memory_mb: int = Field(
        256,
        ge=4,
        description="How much memory large answers of all MCP servers of the toolbox may take while they are on their "
        "way into sessions; the next waits for room.",
    )
    upstream_questions: int = Field(
        20,
        ge=0,
        description="How many questions an MCP server of the toolbox may put to a person during one call; with the "
        "next, the call is given up.",
    )
    policy: Annotated[str, AfterValidator(kinds.absolute_file)] = Field(
        "",
        description="The file of guardrails: which tools and code sessions may use, and what callers may see; a "
        "file that is not in order stops the server.",
        json_schema_extra={"allowed": "the path of a TOML file, or empty text"},
    )
    guardrails: bool = Field(
        True, description="Whether the policy is obeyed, privacy included; `GUARDRAILS_ENABLED` works too."
    )
    guardrails_strict: bool = Field(
        False,
        description="Refuse tools that no rule allows, and code that rules only warn of or cannot see through; "
        "`GUARDRAILS_STRICT_MODE` works too.",
    )
    secrets_file: Annotated[str, AfterValidator(kinds.absolute_file)] = Field(
        "",
        description='A file with secrets that the policy lets tools have, `NAME = "value"` a line; '
        "`BELLJAR_SECRET_NAME` variables come first.",
        json_schema_extra={"allowed": "the path of a TOML file, or empty text"},
    )
    blocked_patterns: list[str] = Field(
        [],
        description="Code that does not run, beside the policy's: names like `os.system`, or patterns like "
        "`open(_, 'w*')`, which have a comma and so need JSON in a variable; `BLOCKED_PATTERNS` works too.",
    )
    http: Annotated[str, AfterValidator(kinds.checked_address)] = Field(
        "",
        description="Serve streamable HTTP at this `HOST:PORT`; empty means stdio.",
        json_schema_extra={"allowed": "HOST:PORT, or empty text"},
    )
    workers: kinds.Workers = Field(
        1,
        description="Servers at that address, each with sessions of its own that every connection reaches; they divide "
        "`max_sessions`, `max_running`, `max_waiting`, `max_connections`, `pool_size` and `gpu_contexts`; `auto` is "
        "one for two processors, at most 32.",
        json_schema_extra={"allowed": 'a whole number from 1 to 64, or "auto"'},
    )
    fleet_peers: Annotated[str, AfterValidator(kinds.checked_peers)] = Field(
        "",
        description="Where the other machines are that share their sessions with this one: a file with the "
        "`fleet_address` of each as a URL a line (and `gone` behind one that is known to be dead), read again when it "
        "changes; or a DNS name with an address for each, and their port.",
        json_schema_extra={"allowed": "file:PATH, dns:NAME:PORT, or empty text"},
    )
    fleet_address: Annotated[str, AfterValidator(kinds.checked_address)] = Field(
        "",
        description="`HOST:PORT` at which this machine answers those others and nobody else; further workers take the "
        "ports after it; off loopback `tls_certificate` has to be set, or `trust_network`.",
        json_schema_extra={"allowed": "HOST:PORT, or empty text"},
    )
    fleet_key: Annotated[SecretStr, AfterValidator(kinds.checked_fleet_key)] = Field(
        SecretStr(""),
        description="The secret by which they know each other, the same at all: who has it speaks for every caller; a "
        "file may not hold it.",
        json_schema_extra={"allowed": "at least 32 bytes, as `openssl rand -hex 32` prints them, or empty text"},
    )
    api_keys: list[Annotated[SecretStr, AfterValidator(checked_key)]] = Field(
        [],
        description="Bearer keys that HTTP accepts: `KEY`, `NAME:KEY` or `NAME:sha256:HEX`; a file may hold the "
        "hashed form only, as `belljar key` prints it.",
        json_schema_extra={"allowed": "a list of KEY, NAME:KEY or NAME:sha256:HEX"},
    )
    trust_network: bool = Field(
        False,
        description="Serve whoever can connect, without credentials and under any host name: only where something in "
        "front lets nobody else through, as in a session pool of Azure.",
    )
    tls_certificate: Annotated[str, AfterValidator(kinds.absolute_file)] = Field(
        "",
        description="Serve HTTPS with this certificate, a PEM file with the whole chain.",
        json_schema_extra={"allowed": "the path of a file, or empty text"},
    )
    tls_key: Annotated[str, AfterValidator(kinds.absolute_file)] = Field(
        "",
        description="The private key of that certificate, a PEM file without a password.",
        json_schema_extra={"allowed": "the path of a file, or empty text"},
    )
    oauth_issuer: str = Field("", description="Accept OAuth access tokens of this issuer (a URL).")
    oauth_audience: str = Field(
        "", description="This server's own canonical URL, which tokens must be meant for, like `https://host/mcp`."
    )
    oauth_jwks_url: str = Field(
        "", description="Where the issuer's signing keys are; empty means what the issuer's metadata says."
    )
    oauth_scopes: list[str] = Field([], description="Scopes that every token must carry.")
    oauth_client_id: str = Field(
        "",
        description="The public client under which people sign in to the console at this issuer (authorisation code "
        "with PKCE); its redirect URI is `/console/oauth/callback` of `oauth_audience`'s host.",
    )
    allowed_hosts: list[str] = Field([], description="`Host` headers accepted beside those of the served address.")
    allowed_origins: list[str] = Field([], description="`Origin` headers accepted from browsers.")
    max_connections: int = Field(
        256,
        ge=16,
        description="HTTP connections that may be open at once, and never more than a quarter of the files that the "
        "server may have open; over it, the one that has waited longest to send its request is closed; one caller with "
        "credentials may have half of them at work.",
    )
    metrics: Literal["off", "local", "open"] = Field(
        "local",
        description="Who may read `/metrics` over HTTP: nobody, callers on this machine (with their credentials, where "
        "any are set up), or everyone who can connect.",
    )
    public_url: Annotated[str, AfterValidator(kinds.public_address)] = Field(
        "",
        description="Where people reach this server, like `https://belljar.example.org`, behind a proxy for instance: "
        "agents tell them this address, its host is allowed, and over HTTPS the console's cookies are for HTTPS only.",
        json_schema_extra={"allowed": "an http or https address without a path, or empty text"},
    )
    console: bool = Field(
        True, description="Serve the console at `/console` and its API at `/api/v1` beside MCP over HTTP."
    )
    console_link: bool = Field(
        True,
        description="Whether the server's own user gets links that sign in to the console once, as an operator; "
        "without them keys are the only way in.",
    )
    console_operators: list[str] = Field(
        [],
        description="Principals that are operators, like `key:alice`: in the console and its API they see the sessions "
        'of all owners and answer questions of rules with `answered_in = "console"`; never name an agent\'s key here.',
    )
    console_scripts: Literal["ask", "never"] = Field(
        "ask",
        description="Whether a person may let scripts of outputs run in the console, once or for a session.",
    )
    egress: list[Annotated[str, AfterValidator(kinds.checked_rule)]] = Field(
        [],
        description="Hosts that the code of sessions may reach: `HOST:PORT`, `*.DOMAIN:PORT`, or `packages` for the "
        "package index that pip and uv are configured for; none by default; `ALLOWED_NETWORKS` works too.",
        json_schema_extra={"allowed": 'a list of HOST:PORT, *.DOMAIN:PORT or "packages"'},
    )
    allow_network_access: bool = Field(
        True,
        description="False closes the network to sessions, whatever `egress` says; `ALLOW_NETWORK_ACCESS` works too.",
    )
    egress_allow_private: bool = Field(
        False,
        description="Whether an allowed host may have a private address, for sites whose mirrors do; link-local and "
        "metadata addresses are never reached.",
    )
    session_idle_s: kinds.Seconds = Field(
        1800, description="A session that nothing used for this long expires; never while something runs."
    )
    sweep_interval_s: kinds.Seconds = Field(30, description="How often expired sessions are looked for.")
    max_sessions: int = Field(
        64,
        ge=1,
        description="Sessions that may be alive at once; a server of several that is to take none, and only to pass "
        "requests on, is drained (`belljar fleet drain`).",
    )
    owner_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="The largest part of `max_sessions` that one owner may have open where there are several (more "
        "than one API key, or OAuth), beyond which the owner's longest idle session is put to sleep first; an only "
        "owner may have all.",
    )
    max_running: int = Field(
        64, ge=1, description="Executions that may run at once in all sessions; the others wait, fairly between owners."
    )
    max_waiting: int = Field(1_000, ge=1, description="Executions that may wait to run; more are refused as busy.")
    memory_headroom_mb: int = Field(
        256, ge=1, description="Memory of the machine that stays free: below it no session or kernel is started."
    )
    max_queue: int = Field(32, ge=1, description="Executions that may wait in one session.")
    fork_start: bool = Field(
        True, description="Start sessions as forks of a process that has everything imported, where the sandbox can."
    )
    preload: list[Annotated[str, AfterValidator(kinds.checked_module)]] = Field(
        ["numpy", "pandas", "matplotlib.pyplot"],
        description="Modules that this process imports before any session needs them; those not installed are skipped.",
        json_schema_extra={"allowed": "a list of module names"},
    )
    pool_size: Annotated[int, AfterValidator(kinds.within_sessions)] = Field(
        1, ge=0, description="Sessions kept ready before anyone asks for them; with 0, only an empty sandbox is."
    )
    checkpoints: int = Field(3, ge=0, description="Earlier states of a session that it can be rewound to; 0 for none.")
    checkpoint_memory_mb: int = Field(
        1_024,
        ge=1,
        description="Memory that the earlier states of one session may hold; the oldest are dropped over it.",
    )
    checkpoint_disk_mb: int = Field(
        1_024, ge=1, description="Disk that the earlier files of one session may take; over it files are not rewound."
    )
    on_death: Annotated[Literal["fresh", "rewind"], AfterValidator(kinds.with_checkpoints)] = Field(
        "fresh",
        description="What follows when a session's process dies: `fresh` starts an empty one and names what was lost, "
        "`rewind` goes back to the state before the cell that killed it.",
    )
    hibernate: bool = Field(
        True, description="Keep sessions on disk when they expire or the server stops; the next call wakes them."
    )
    keep_alive: bool = Field(
        False,
        description="Let the processes of sessions outlive the server, killed or stopped, so that the next one on the "
        "same data directory goes on with their variables and running cells; sandbox `namespace` only.",
    )
    keep_alive_s: kinds.Seconds = Field(
        600, description="How long they wait for the next server under `keep_alive`; then they are ended."
    )
    keep_days: float = Field(7, gt=0, description="How long a session that sleeps on disk, and its journal, are kept.")
    store: Annotated[str, AfterValidator(kinds.checked_store)] = Field(
        "",
        description="Where sessions are put when they fall asleep, so that another server, on another machine too, can "
        "wake them: a folder (`file:///…`), or a bucket of S3 (`s3://…`), Google Cloud Storage (`gs://…`) or Azure "
        "(`az://ACCOUNT/CONTAINER`), for which the extra `store` is needed; without it they sleep in the data "
        "directory only.",
        json_schema_extra={"allowed": "a URL of one of these forms, or empty text"},
    )
    store_key: Annotated[SecretStr, AfterValidator(kinds.checked_store_key)] = Field(
        SecretStr(""),
        description="What is put there is encrypted with this, the same for all servers of a store: at least 32 "
        "characters that nobody can guess, like those of `openssl rand -base64 32`; a file may not hold it.",
    )
    bundle_mb: Annotated[kinds.Count, kinds.limit(1, 1_048_576)] = Field(
        1024,
        description="The largest bundle that a session becomes in the store, packed; a larger session sleeps on this "
        "disk only, and unpacked it may have 16 times as much.",
        json_schema_extra={"allowed": 'a whole number of megabytes, or "none" for no limit'},
    )
    drain_s: kinds.Seconds = Field(
        60,
        description="How long cells may run on when a server that has a store is told to stop, before its sessions are "
        "put to sleep and into the store.",
    )
    execution_timeout_s: kinds.Seconds = Field(
        600,
        description="A cell that runs longer is interrupted, unless its call says otherwise; `MAX_EXECUTION_TIME` "
        "works too.",
    )
    interrupt_grace_s: kinds.Seconds = Field(
        5, description="A cell that ignores its interrupt for this long is killed with its process."
    )
    interrupt_on: Literal["cancel", "disconnect", "nothing"] = Field(
        "cancel",
        description="What a client does to a call that also stops the code it runs: `cancel` is MCP's "
        "`notifications/cancelled`; `disconnect` is that or a connection that ends, which for HTTP clients of protocol "
        "2026-07-28 is the way to cancel; after `nothing` the code goes on, and get_execution returns its result.",
    )
    failures_are_errors: bool = Field(
        True,
        description="Whether the answer about code that raised, ran too long or died has `isError`; without it agents "
        "whose framework gives up at errors can read what went wrong; calls that are refused always have it.",
    )
    systemd_scope: bool = Field(
        True,
        description="Where systemd manages control groups, have it move this process into a scope of its own, in which "
        "the limits of sessions can be set; asked for once, with the limits of the service it leaves.",
    )
    memory_mb: Annotated[kinds.Count, kinds.limit(64, 1_048_576 * 16)] = Field(
        2048,
        description="Memory that all processes of a session may use together, swap included; what goes beyond it is "
        "killed, and the result says `out_of_memory`; `MAX_MEMORY_MB` works too.",
        json_schema_extra={"allowed": 'a whole number of megabytes from 64, or "none" for no limit'},
    )
    cpus: Annotated[kinds.Share, kinds.limit(0.05, 4096)] = Field(
        None,
        description="Processors that a session may keep busy, fractions allowed; code inside sees that many.",
        json_schema_extra={"allowed": 'a number from 0.05, or "none" for all of them'},
    )
    max_processes: Annotated[kinds.Count, kinds.limit(16, 4_194_304)] = Field(
        256,
        description="Processes and threads that a session may have at once; three of them are the sandbox's own.",
        json_schema_extra={"allowed": 'a whole number from 16, or "none" for no limit'},
    )
    disk_mb: Annotated[kinds.Count, kinds.limit(1, 1_048_576 * 1024)] = Field(
        2048,
        description="What a session may keep in its folder, packages included, in 64 files a megabyte or 20,000 if "
        "that is more; a cell that goes beyond it is interrupted, uploads are refused, and no single file becomes "
        "larger.",
        json_schema_extra={"allowed": 'a whole number of megabytes, or "none" for no limit'},
    )
    temporary_mb: Annotated[kinds.Count, kinds.limit(1, 1_048_576 * 16)] = Field(
        512,
        description="Size of `/tmp`, of the home folder and of `/dev/shm`, each; what is in them counts as memory.",
        json_schema_extra={"allowed": 'a whole number of megabytes, or "none" for no limit'},
    )
    max_open_files: Annotated[kinds.Count, kinds.limit(64, 1_073_741_816)] = Field(
        1024,
        description="Files and sockets that one process of a session may have open.",
        json_schema_extra={"allowed": 'a whole number from 64, or "none" for no limit of ours'},
    )
    gpus: kinds.Gpus = Field(
        [],
        description="The GPUs that sessions may have, by index or uuid (`GPU-…`, `MIG-…`); each is shared by the "
        "sessions that are placed on it; an entry of `environments` may have its own `gpus`; sandbox `namespace`.",
        json_schema_extra={
            "allowed": '"none", "all", or a list like `["0", "GPU-6e4e17a9-…"]`',
            "default": '`"none"`',
            "is_text": True,
        },
    )
    session_gpus: int = Field(
        1,
        ge=0,
        description="How many of them a session gets that does not ask; those with the most room come first.",
    )
    max_gpus: Annotated[kinds.Count, kinds.limit(0, 1024)] = Field(
        None,
        description="The most GPUs that one session may ask for, with `new_session(gpus=…)`.",
        json_schema_extra={"allowed": 'a whole number, or "none" for all that `gpus` names'},
    )
    gpu_contexts: Annotated[int, AfterValidator(kinds.within_sessions)] = Field(
        0,
        ge=0,
        description="Sessions kept ready that hold a context on a GPU already, which saves their first tensor 0.3 s "
        "and takes 0.6 GB of GPU memory each.",
    )
    start_timeout_s: kinds.Seconds = Field(60, description="How long a kernel may take to get ready.")
    output_budget_chars: int = Field(
        20_000, ge=200, description="Characters of output in one answer; the rest is kept behind a link."
    )
    output_cap_bytes: int = Field(
        256 * MEBIBYTE, ge=1, description="Output kept of one execution; what comes after it is counted and dropped."
    )
    journal_mb: Annotated[kinds.Count, kinds.limit(16, 1_048_576 * 1024)] = Field(
        4096,
        description="Disk that the journal may take, with the displays of executions; over it the output of the oldest "
        "finished executions is dropped, which whoever asks for it is told.",
        json_schema_extra={"allowed": 'a whole number of megabytes from 16, or "none" for no limit'},
    )
    image_budget_bytes: int = Field(
        700_000, ge=1, description="Bytes of images in one answer; larger ones are scaled down, the original linked."
    )
    ask_in_console: Literal["present", "always", "never"] = Field(
        "present",
        description="Whether a cell whose client cannot ask may ask a person in the console or with `belljar inbox`: "
        "`present` while somebody has one of them open, `always` also while nobody has, `never` only in the client.",
    )
    ask_timeout_s: kinds.Seconds = Field(
        600,
        description="How long a cell may wait for answers of people, all its questions together; its own time stands "
        "still meanwhile.",
    )
    inbox_webhook: Annotated[SecretStr, AfterValidator(kinds.checked_webhook)] = Field(
        SecretStr(""),
        description="A URL that is told of each new question that waits for a person, without code and values; "
        "`egress` has to allow its host.",
        json_schema_extra={"allowed": "an https: URL, an http: URL on this machine, or empty text"},
    )
    inbox_webhook_secret: Annotated[SecretStr, AfterValidator(kinds.checked_webhook_secret)] = Field(
        SecretStr(""),
        description="Signs what is sent there, as Standard Webhooks do; a file may not hold it.",
        json_schema_extra={"allowed": "`whsec_` and what `openssl rand -base64 32` prints, or empty text"},
    )
    try_code: bool = Field(
        False,
        description="Offer models the tool `try_code`, which runs alternatives side by side, each in a fork of a "
        "session, and goes on in one of them; a tool more costs tokens.",
    )
    apps: Literal["auto", "off"] = Field(
        "auto",
        description="Whether clients that draw pages of servers (MCP Apps) are offered `show_session`, which shows the "
        "person a session's cells and figures; other clients never see it.",
    )
    structured: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether answers carry `structuredContent`: `auto` leaves it out beside images, for clients that "
        "drop images then or cannot be told apart.",
    )
    tool_result_bytes: int = Field(
        4 * MEBIBYTE,
        ge=1_024,
        description="The largest result of a tool that the code of a session gets as a value; a larger one becomes a "
        "file in the session folder, and the code gets a handle to it.",
    )
    max_code_bytes: int = Field(MEBIBYTE, ge=1, description="The longest code one call may bring.")
    max_upload_bytes: int = Field(128 * MEBIBYTE, ge=1, description="The largest file one call may bring.")
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(kinds.level_name)] = Field(
        "INFO", description="How much is logged to stderr; `LOG_LEVEL` works too."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="What the lines of the log are: text for people, or JSON objects for programs."
    )

    @property
    def only_owner(self) -> str:
        """Return the principal that owns all sessions; empty if callers may be several people."""
        names = {parse_key(key.get_secret_value()).name for key in self.api_keys}
        if self.oauth_issuer or len(names) > 1:
            return ""
        return f"key:{names.pop()}" if names else LOCAL_PRINCIPAL

    @property
    def shares_always(self) -> bool:
        """Tell whether sessions have a `workspace/` even if there are no tools."""
        is_used = bool(self.workspace_directory) or self.has_workflows
        return self.workspace == "on" or (self.workspace == "auto" and is_used)

    @property
    def has_workflows(self) -> bool:
        """Tell whether clients see the tools of workflows."""
        return self.workflows == "on" or (self.workflows == "auto" and bool(self.workflows_directory))
