"""Explains the errors of the queue, the daemon, its settings and its API."""

from __future__ import annotations

THEMES: dict[str, dict[str, tuple[str, str]]] = {
    "Jobs in the queue": {
        "job-ended": (
            "The job is already over.",
            "`offmate show ID` shows it. `offmate retry` or `offmate rerun` runs it again.",
        ),
        "job-begun": (
            "The job does not wait any more, so its place in the queue or its hold cannot change.",
            "Use `offmate pause ID` for a running job.",
        ),
        "job-not-over": (
            "Files of the job cannot be removed while it is not over.",
            "Wait for it, or `offmate cancel ID`.",
        ),
        "job-unfinished": (
            "The job failed or was cancelled, and `offmate retry` would need its checkpoints.",
            "`offmate clean --unfinished` removes them.",
        ),
        "not-held": (
            "The job waits for nothing but its turn, so there is nothing to release.",
            "`offmate move ID --first` gives it the next turn.",
        ),
        "not-paused": (
            "The job is neither paused nor held.",
            "`offmate show ID` shows its state.",
        ),
        "not-to-retry": (
            "Only a job that failed or was cancelled can be tried again.",
            "`offmate rerun ID` submits a job of any state again.",
        ),
        "not-asked": (
            "Nothing was removed, because the command cannot ask you: there is no terminal, or `--json` is given.",
            "Add `--yes`.",
        ),
        "key-taken": (
            "Another job was submitted under the same `Idempotency-Key`.",
            "Use a new key for each job, such as a UUID.",
        ),
        "job-not-handled": (
            "The daemon could not handle the job.",
            "daemon.log in the state folder says why. `offmate retry ID` tries again.",
        ),
    },
    "Run folders without a job": {
        "job-adopted": (
            "The job was made again from its run folder, and had not ended when the database was lost.",
            "`offmate retry ID` continues from its last checkpoint.",
        ),
        "not-a-run": (
            "The folder is not the run folder of a job.",
            "`offmate adopt` without a folder takes all run folders that no job has.",
        ),
        "run-known": (
            "The run folder already has a job.",
            "`offmate show ID` shows the job.",
        ),
        "run-lives": (
            "A process still works in the run folder.",
            "End its daemon, or wait until the process has ended.",
        ),
        "run-unreadable": (
            "The run folder cannot be read, so no job was made of it.",
            "Repair the folder, then `offmate adopt FOLDER`.",
        ),
    },
    "The daemon": {
        "daemon-not-running": (
            "The daemon is not running.",
            "`offmate up`",
        ),
        "daemon-did-not-start": (
            "The daemon did not start. The error shows the end of its log.",
            "Correct what the log says.",
        ),
        "daemon-ended": (
            "The daemon ended while the command followed a job. The job continues at its next start.",
            "`offmate up`, then `offmate logs -f ID`.",
        ),
        "daemon-silent": (
            "The daemon does not answer.",
            "Try again. On another machine check `listen` and the tunnel. Otherwise end its process, then "
            "`offmate up`.",
        ),
        "daemon-error": (
            "The daemon made a mistake: this is a bug in offmate.",
            "daemon.log in the state folder says more.",
        ),
        "already-running": (
            "A daemon runs already with this state folder.",
            "`offmate status` uses it. `offmate down` ends it.",
        ),
        "other-version": (
            "The daemon is of another version of offmate than the command.",
            "`offmate down`, then `offmate up`. Jobs continue from a checkpoint.",
        ),
        "system-error": (
            "The operating system refused an operation of the daemon.",
            "daemon.log in the state folder says more.",
        ),
    },
    "Settings of the daemon": {
        "bad-config": (
            "config.toml cannot be read, has an unknown key, or has a value of the wrong form.",
            "Correct config.toml. See [Settings of the daemon](config.md).",
        ),
        "bad-address": (
            "`listen` is not an address with a port.",
            "Write it like `127.0.0.1:8477`.",
        ),
        "bad-host": (
            "`OFFMATE_HOST` is not an address with a port, or `OFFMATE_TOKEN` is not a token.",
            "Set `OFFMATE_HOST` like `http://127.0.0.1:8477`. The token is in the file api-token in the state "
            "folder of that machine.",
        ),
        "not-remote": (
            "The command works only with the daemon of this machine, and `OFFMATE_HOST` is set.",
            "Type it on that machine, or unset `OFFMATE_HOST`.",
        ),
        "state-folder": (
            "The state folder cannot be used.",
            "Set `OFFMATE_HOME` to a folder of your own.",
        ),
        "socket-path-too-long": (
            "The path of the daemon's sockets is longer than the system allows.",
            "Set `OFFMATE_HOME` to a shorter path.",
        ),
        "bad-token": (
            "The API token in the file is too easy to guess, or has characters that cannot be sent.",
            "Delete the file. The daemon makes another one when it starts.",
        ),
        "no-service": (
            "The service is not installed.",
            "`offmate service install`",
        ),
        "no-systemd": (
            "There is no systemd for this user to start a service.",
            "`offmate up` starts the daemon. You can add it to your login script.",
        ),
        "systemd-failed": (
            "systemd did not accept the service. The error shows its message.",
            "Correct what the message says. daemon.log has what the daemon said, if it started.",
        ),
    },
    "Database and broker": {
        "bad-database-url": (
            "`database_url` cannot be used.",
            "Write it like `sqlite:////home/me/offmate.db`, and install its driver if it needs one.",
        ),
        "database-unreachable": (
            "The database cannot be opened.",
            "Check that its folder exists and its server runs. See `database_url`.",
        ),
        "database-busy": (
            "The database is busy.",
            "Try again in a moment.",
        ),
        "database-damaged": (
            "The database is damaged.",
            "Move it away: `offmate up` then starts with an empty queue, and `offmate adopt` makes jobs of the "
            "run folders again. The error names copies to go back to, if there are any.",
        ),
        "database-not-ready": (
            "The database has no tables for plans yet.",
            "`offmate up`",
        ),
        "database-not-upgraded": (
            "The database could not be upgraded, and is unchanged.",
            "Check that its disk has room. Otherwise install the version that you had before.",
        ),
        "database-too-new": (
            "A newer version of offmate made the database.",
            "Install the newer version again, or go back to a copy in the folder that the error names.",
        ),
        "no-broker": (
            "There is no Redis or Valkey server to start.",
            "Install valkey or redis, or set `redis_url`.",
        ),
        "bad-redis-url": (
            "`redis_url` cannot be used.",
            "Write it like `redis://localhost:6379/0`.",
        ),
        "broker-silent": (
            "The broker does not answer.",
            "Check that the server at `redis_url` runs.",
        ),
    },
    "The API": {
        "no-token": (
            "The request over TCP has no token, or a wrong one.",
            "`offmate page` gives an address that has it. Programs send `Authorization: Bearer TOKEN`.",
        ),
        "bad-request": (
            "The daemon does not know the request, or a value in it is out of range.",
            "Check the request against [the API](api.md). If a command shows this, restart the daemon: it may be "
            "of another version.",
        ),
        "request-too-large": (
            "The request is too large.",
            "Name data in the job file; do not send them.",
        ),
        "request-too-slow": (
            "The request was not complete within the time limit.",
            "Send it again.",
        ),
        "request-unframed": (
            "The request gives its length in two ways.",
            "Leave `Transfer-Encoding` out.",
        ),
        "relative-folder": (
            "The folder of a submitted file is not an absolute path.",
            "Give the folder from the root (`/data/jobs`) or from your home folder (`~/jobs`).",
        ),
    },
    "Messages": {
        "bad-notify": (
            "An address in `notify` is not one that apprise knows, or it is not in the settings any more.",
            "Write an address as apprise documents it, such as `ntfy://topic`, and restart the daemon.",
        ),
        "no-notify": (
            "The settings have no address for messages.",
            "Set `notify` in config.toml, and restart the daemon.",
        ),
        "not-notified": (
            "The message did not reach an address.",
            "Check the network and the address.",
        ),
    },
}
