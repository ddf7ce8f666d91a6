"""Settings of the rollout service, read from the environment and var/stack.env."""

import hashlib
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from prorl_site.env import load
from rollouts import queues

BASE_DIR = Path(__file__).resolve().parent.parent.parent

# 1. Environment ---------------------------------------------------------------------------------
VAR_DIR = Path(os.environ.get("PRORL_VAR") or BASE_DIR / "var").resolve()
ENV = load(VAR_DIR / "stack.env")
ENV.text("PRORL_VAR", str(VAR_DIR))

SECRET_KEY = ENV.text("PRORL_SECRET_KEY")
DEBUG = ENV.boolean("PRORL_DEBUG", False)
ALLOWED_HOSTS = ENV.words("PRORL_ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]")
CSRF_TRUSTED_ORIGINS = ENV.words("PRORL_TRUSTED_ORIGINS")
BEHIND_TLS = ENV.boolean("PRORL_TLS", False)

# 2. Applications --------------------------------------------------------------------------------
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "knox",
    "django_filters",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "sandboxes",
    "rollouts",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "prorl_site.urls"
ASGI_APPLICATION = "prorl_site.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

# 3. Database: PostgreSQL, always ----------------------------------------------------------------
_database = conninfo_to_dict(ENV.text("DATABASE_URL"))
DATABASE_POOL_SIZE = ENV.integer("PRORL_DATABASE_POOL", 16, minimum=2)
DATABASES: dict[str, dict[str, Any]] = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _database.pop("dbname", "prorl"),
        "USER": _database.pop("user", "postgres"),
        "PASSWORD": _database.pop("password", None) or "",
        "HOST": _database.pop("host", ""),
        "PORT": str(_database.pop("port", "") or ""),
        "CONN_MAX_AGE": 0,
        "OPTIONS": {
            # A host that vanished is told within seconds, well inside a lease; DATABASE_URL wins.
            "connect_timeout": 5,
            "tcp_user_timeout": 10_000,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 2,
            **_database,
            "application_name": "prorl",
            "pool": {"min_size": 1, "max_size": DATABASE_POOL_SIZE, "timeout": 30},
        },
    }
}
# Our own token model replaces knox's: its table would only stand in the way.
MIGRATION_MODULES = {"knox": None}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# 4. Broker and Celery ---------------------------------------------------------------------------
BROKER_URL = ENV.text("BROKER_URL")
CELERY_BROKER_URL = BROKER_URL
CELERY_BROKER_TRANSPORT = (
    "prorl_site.transport:Transport" if BROKER_URL.startswith(("redis://", "rediss://")) else None
)
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
# The sockets' patience is above the second that a consumer's BRPOP takes on an idle queue.
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "visibility_timeout": 3600,
    "socket_keepalive": True,
    "socket_timeout": 5,
    "socket_connect_timeout": 5,
}
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_CREATE_MISSING_QUEUES = False
CELERY_TASK_QUEUES = [queues.named_queue(name) for name in queues.STAGE_QUEUES]
CELERY_TASK_DEFAULT_QUEUE = queues.CONTROL
CELERY_TASK_ROUTES = {"rollouts.tasks.control_*": {"queue": queues.CONTROL}}
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_SEND_TASK_EVENTS = False
CELERY_TIMEZONE = "UTC"

# 5. Deadlines, in seconds; they nest: tool call < stage budget < lease limit < Celery's limit ---
LEASE_SECONDS = ENV.seconds("PRORL_LEASE_SECONDS", 30, minimum=2)
HEARTBEAT_SECONDS = ENV.seconds("PRORL_HEARTBEAT_SECONDS", LEASE_SECONDS / 6, minimum=0.2)
CANCEL_POLL_SECONDS = ENV.seconds("PRORL_CANCEL_POLL_SECONDS", 1, minimum=0.1)
REAPER_SECONDS = ENV.seconds("PRORL_REAPER_SECONDS", 10, minimum=0.5)
DISPATCH_SECONDS = ENV.seconds("PRORL_DISPATCH_SECONDS", 2, minimum=0.2)
REPUBLISH_SECONDS = ENV.seconds("PRORL_REPUBLISH_SECONDS", 20, minimum=1)
RETRY_DELAY_SECONDS = ENV.seconds("PRORL_RETRY_DELAY_SECONDS", 2, minimum=0)
BATCH_LEASE_SECONDS = ENV.seconds("PRORL_BATCH_LEASE_SECONDS", 900, minimum=1)
BATCH_WAIT_LIMIT_SECONDS = ENV.seconds("PRORL_BATCH_WAIT_LIMIT_SECONDS", 60, minimum=0)
TOOL_CALL_LIMIT_SECONDS = ENV.seconds("PRORL_TOOL_CALL_LIMIT_SECONDS", 600, minimum=1)
STAGE_LIMIT_SECONDS = ENV.seconds("PRORL_STAGE_LIMIT_SECONDS", 3600, minimum=1)
STAGE_GRACE_SECONDS = ENV.seconds("PRORL_STAGE_GRACE_SECONDS", 60, minimum=1)
CELERY_TASK_TIME_LIMIT = ENV.integer("PRORL_HARD_LIMIT_SECONDS", 3900, minimum=1)

CELERY_BEAT_SCHEDULE_FILENAME = str(VAR_DIR / "celerybeat-schedule")


def _every(seconds: float, task: str) -> dict[str, Any]:
    """Return a beat entry; the next message replaces one that nobody took for a period."""
    # Never under 5 s: the clocks of beat and of the workers may differ a little.
    return {
        "task": f"rollouts.tasks.{task}",
        "schedule": seconds,
        "options": {"expires": max(seconds, 5.0)},
    }


CELERY_BEAT_SCHEDULE = {
    "dispatch": _every(DISPATCH_SECONDS, "control_dispatch"),
    "reap": _every(REAPER_SECONDS, "control_reap"),
    "sweep": _every(ENV.seconds("PRORL_SWEEP_SECONDS", 60, minimum=1), "control_sweep"),
    "check-servers": _every(
        ENV.seconds("PRORL_SERVER_CHECK_SECONDS", 15, minimum=1), "control_check_servers"
    ),
    "policy-updates": _every(
        ENV.seconds("PRORL_POLICY_UPDATE_SECONDS", 2, minimum=0.2), "control_policy_updates"
    ),
    "feed": _every(ENV.seconds("PRORL_FEED_SECONDS", 1, minimum=0.2), "control_feed"),
    "webhooks": _every(ENV.seconds("PRORL_WEBHOOKS_SECONDS", 2, minimum=0.2), "control_webhooks"),
}

# 6. Node and sandboxes --------------------------------------------------------------------------
DEPLOYMENT = ENV.text(
    "PRORL_DEPLOYMENT", hashlib.sha256(ENV.text("DATABASE_URL").encode()).hexdigest()[:8]
)
NODE_NAME = ENV.text("PRORL_NODE", socket.gethostname().split(".")[0].lower())
NODE_CAPACITY = ENV.integer("PRORL_NODE_CAPACITY", 16, minimum=0)
SANDBOX_RUNTIME = ENV.text("PRORL_RUNTIME", "apptainer")
SANDBOX_ROOT = Path(ENV.text("PRORL_SANDBOX_ROOT", str(VAR_DIR / "node"))).resolve()
SANDBOX_ACCOUNT = ENV.text("PRORL_SANDBOX_ACCOUNT", "prorl-sandbox")
SANDBOX_ENGINE = ENV.text("PRORL_ENGINE", "")
SANDBOX_OVERLAY = ENV.text("PRORL_OVERLAY", "auto")
SANDBOX_CGROUPS = ENV.text("PRORL_CGROUPS", "auto")
EGRESS = ENV.boolean("PRORL_EGRESS", False)
LAYER_CACHE_BYTES = ENV.integer("PRORL_LAYER_CACHE_BYTES", 50 * 1024**3, minimum=0)
IMAGE_ROOT = Path(ENV.text("PRORL_IMAGE_ROOT", str(VAR_DIR / "images"))).resolve()


def _folder(name: str) -> Path | None:
    """Return the engine's folder that the operator set, by our name or the engine's own."""
    path = ENV.text(f"PRORL_{name}", ENV.text(name, ""))
    return Path(path).resolve() if path else None


IMAGE_BUILD_SECONDS = ENV.seconds("PRORL_IMAGE_BUILD_SECONDS", 3600, minimum=1)
IMAGE_BUILDS = ENV.integer("PRORL_IMAGE_BUILDS", 2, minimum=1)
IMAGE_CACHE_BYTES = ENV.integer("PRORL_IMAGE_CACHE_BYTES", 200 * 1024**3)
ENGINE_CACHE_BYTES = ENV.integer("PRORL_ENGINE_CACHE_BYTES", 20 * 1024**3)
DISK_RESERVE_BYTES = ENV.integer("PRORL_DISK_RESERVE_BYTES", 1024**3)
INSECURE_REGISTRIES = ENV.words("PRORL_INSECURE_REGISTRIES")
APPTAINER_TMPDIR = _folder("APPTAINER_TMPDIR")
APPTAINER_CACHEDIR = _folder("APPTAINER_CACHEDIR")

# 7. Trajectories --------------------------------------------------------------------------------
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    "trajectories": {
        "BACKEND": ENV.text("PRORL_TRAJECTORY_STORAGE", "rollouts.storage.SyncedFileStorage"),
        "OPTIONS": {"location": ENV.text("PRORL_TRAJECTORIES", str(VAR_DIR / "trajectories"))},
    },
}

# 8. API -----------------------------------------------------------------------------------------
KNOX_TOKEN_MODEL = "rollouts.TrainerToken"  # noqa: S105
REST_KNOX = {"AUTH_HEADER_PREFIX": "Bearer", "TOKEN_TTL": timedelta(days=90), "AUTO_REFRESH": False}
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "prorl_site.api.authentication.TrainerTokenAuthentication",
        "prorl_site.api.authentication.OperatorSessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["prorl_site.api.permissions.HasScope"],
    "DEFAULT_PAGINATION_CLASS": "prorl_site.api.pagination.CreatedCursorPagination",
    "DEFAULT_FILTER_BACKENDS": ["prorl_site.api.filters.StrictFilterBackend"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["prorl_site.api.parsers.BoundedJSONParser"],
    "DEFAULT_SCHEMA_CLASS": "prorl_site.api.schema.ApiSchema",
    "EXCEPTION_HANDLER": "prorl_site.api.problems.exception_handler",
    "PAGE_SIZE": 100,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Rollout service",
    "DESCRIPTION": "Rollouts of LLM agents as a service: submit tasks, lease trajectories.",
    "VERSION": "1.0.0",
    "SERVE_PUBLIC": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.IsAuthenticated"],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "COMPONENT_SPLIT_REQUEST": True,
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "ENUM_NAME_OVERRIDES": {
        "TrainingModeEnum": "rollouts.modes.MODES",
    }
    | {
        f"{name}Enum": f"{module}.states.{name}"
        for module, names in {
            "rollouts": [
                *("AttemptState", "BatchState", "ExperimentState", "GroupState"),
                *("Outcome", "Purpose", "RolloutState", "ServerState", "Stage", "StopReason"),
                *("ReevaluationState", "UpdateMode", "Verdict", "VerificationState"),
            ],
            "sandboxes": [
                *("ImageBuildKind", "ImageBuildState", "ImageReuse", "ImageState"),
                *("Network", "PromptFormat", "SandboxPurpose", "SandboxState"),
                "Verified",
            ],
        }.items()
        for name in names
    },
}
DATA_UPLOAD_MAX_MEMORY_SIZE = ENV.integer("PRORL_MAX_REQUEST_BYTES", 64 * 1024 * 1024, minimum=1024)

# 9. Web -----------------------------------------------------------------------------------------
STATIC_URL = "static/"
STATIC_ROOT = VAR_DIR / "static"
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = DEBUG
LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SECURE = BEHIND_TLS
CSRF_COOKIE_SECURE = BEHIND_TLS
SECURE_SSL_REDIRECT = BEHIND_TLS
SECURE_HSTS_SECONDS = 31536000 if BEHIND_TLS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = BEHIND_TLS
SECURE_HSTS_PRELOAD = BEHIND_TLS
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if BEHIND_TLS else None
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

# The Procfile's own variables.
PROCFILE = {
    "host": ENV.text("PRORL_HOST", "127.0.0.1"),
    "port": ENV.integer("PRORL_PORT", 8000, minimum=1),
    "init": ENV.integer("PRORL_INIT_WORKERS", 8, minimum=1),
    "run": ENV.integer("PRORL_RUN_WORKERS", 64, minimum=1),
    "eval": ENV.integer("PRORL_EVAL_WORKERS", 2, minimum=1),
}

# 10. Logging ------------------------------------------------------------------------------------
LOG_LEVEL = ENV.text("PRORL_LOG_LEVEL", "INFO")
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {"format": "%(asctime)s %(levelname)s %(process)d %(name)s %(message)s"},
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": LOG_LEVEL},
    "loggers": {
        "httpx": {"level": "WARNING"},
        "httpcore": {"level": "WARNING"},
        "celery.worker.strategy": {"level": "WARNING"},
        "celery.app.trace": {"level": "WARNING"},
        "celery.beat": {"level": "WARNING"},
        "rollouts": {"level": LOG_LEVEL},
    },
}

# Host-side tools ---------------------------------------------------------------------------------
SEARCH_URL = ENV.text("PRORL_SEARCH_URL", "")
SEARCH_HOSTS = ENV.words("PRORL_SEARCH_HOSTS")
# Not the sandboxes' account, which owns every instance and layer of this node.
MCP_ACCOUNT = ENV.text("PRORL_MCP_ACCOUNT", "nobody")
MCP_SERVERS = ENV.text("PRORL_MCP_SERVERS", "")
TOOL_RECORDING = ENV.text("PRORL_TOOL_RECORDING", "live")
TOOL_RECORDINGS = ENV.text("PRORL_TOOL_RECORDINGS", str(VAR_DIR / "recordings"))

# Policy updates ----------------------------------------------------------------------------------
POLICY_CONTROL = ENV.boolean("PRORL_POLICY_CONTROL", False)
POLICY_GATE_LEASE_SECONDS = ENV.seconds("PRORL_POLICY_GATE_LEASE_SECONDS", 15, minimum=0.5)
POLICY_UPDATE_LIMIT_SECONDS = ENV.seconds("PRORL_POLICY_UPDATE_LIMIT_SECONDS", 3600, minimum=1)

# Agents ------------------------------------------------------------------------------------------
AGENT_HANDLERS = ENV.words("PRORL_AGENT_HANDLERS")

# Groups ------------------------------------------------------------------------------------------
GROUP_FILTERS = ENV.words("PRORL_GROUP_FILTERS")

# Evaluators --------------------------------------------------------------------------------------
EVALUATORS = ENV.words("PRORL_EVALUATORS")
# Patterns of the hosts that environments may name as judges; empty: any.
JUDGE_HOSTS = ENV.words("PRORL_JUDGE_HOSTS")
JUDGE_CACHE = ENV.text("PRORL_JUDGE_CACHE", str(VAR_DIR / "judge-cache"))
JUDGE_CACHE_BYTES = ENV.integer("PRORL_JUDGE_CACHE_BYTES", 256 * 1024 * 1024, minimum=0)

# Chat servers ------------------------------------------------------------------------------------
# Patterns of the hosts that trainers may name as inference servers; empty: any.
INFERENCE_HOSTS = ENV.words("PRORL_INFERENCE_HOSTS")
OPENAI_API_KEY = ENV.text("PRORL_OPENAI_API_KEY", "")
OPENAI_HOSTS = ENV.words("PRORL_OPENAI_HOSTS", "api.openai.com")

# Events and webhooks -----------------------------------------------------------------------------
EVENTS_KEPT = ENV.integer("PRORL_EVENTS_KEPT", 10_000, minimum=100)
EVENTS_LISTENERS = ENV.integer("PRORL_EVENTS_LISTENERS", 500, minimum=1)
EVENTS_PING_SECONDS = ENV.seconds("PRORL_EVENTS_PING_SECONDS", 15, minimum=0.1)
# Patterns of private hosts that webhooks may name; public addresses need no pattern.
WEBHOOK_HOSTS = ENV.words("PRORL_WEBHOOK_HOSTS")
WEBHOOK_SECONDS = ENV.seconds("PRORL_WEBHOOK_SECONDS", 10, minimum=0.1)
WEBHOOK_GIVE_UP_DAYS = ENV.seconds("PRORL_WEBHOOK_GIVE_UP_DAYS", 5, minimum=0.01)

# The reference system's surface -------------------------------------------------------------------
# TOML or JSON file that maps its requests onto policies and environments; empty: not served.
REFERENCE_SURFACE = ENV.text("PRORL_REFERENCE_SURFACE", "")

# Secrets of environments --------------------------------------------------------------------------
# Beside PRORL_SECRET_<NAME>: the folder of what environments name as file:<path>; empty: none.
SECRETS_DIR = ENV.text("PRORL_SECRETS_DIR", "")

# Imports of tasks --------------------------------------------------------------------------------
# Uploads wait there until they are imported: one folder for the web and the control workers.
IMPORT_FOLDER = Path(ENV.text("PRORL_IMPORT_FOLDER", str(VAR_DIR / "imports"))).resolve()
IMPORT_MAX_BYTES = ENV.integer("PRORL_IMPORT_MAX_BYTES", 2 * 1024**3, minimum=1)
# Folders whose content operators may import without an upload; empty: none.
IMPORT_ROOTS = ENV.words("PRORL_IMPORT_ROOTS")
