BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0003');
CREATE TABLE answers (
	id INTEGER NOT NULL,
	"key" VARCHAR(64) NOT NULL,
	document JSON NOT NULL,
	hits INTEGER NOT NULL,
	created_at DATETIME NOT NULL,
	used_at DATETIME NOT NULL,
	PRIMARY KEY (id),
	UNIQUE ("key")
);
CREATE TABLE jobs (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
	name VARCHAR(255) NOT NULL,
	state VARCHAR(16) NOT NULL,
	stop_reason VARCHAR(16),
	priority INTEGER NOT NULL,
	run_dir TEXT NOT NULL,
	owner VARCHAR(128),
	created_at FLOAT NOT NULL,
	started_at FLOAT,
	ended_at FLOAT,
	attempts INTEGER NOT NULL,
	crashes INTEGER NOT NULL,
	last_checkpoint_step INTEGER,
	exit_code INTEGER,
	error JSON,
	result JSON
, history JSON DEFAULT '[]' NOT NULL);
INSERT INTO "jobs" VALUES(1,'done','done',NULL,0,'{state}/runs/1',NULL,1.79533244233735728265e+09,1.79533247167115497591e+09,1.79533250461309194564e+09,1,0,2,0,NULL,'{"event": "end", "time": 1795332501.183688, "step": 3, "status": "done", "output": "{state}/runs/1/output", "step_s": 0.02117724499976248, "measured_steps": 1, "gpu_peak_bytes": 1456488, "predicted_step_s": 0.010114193520315774, "predicted_gpu_peak_bytes": 1457512}','[{"number": 1, "started_at": 1795332471.671155, "from_step": null, "ended_at": 1795332504.612892, "ending": "the trainer is done", "reached_step": 3, "checkpoint_step": 2}]');
INSERT INTO "jobs" VALUES(2,'does-not-fit','failed',NULL,0,'{state}/runs/2',NULL,1.79533250476053547859e+09,NULL,1.79533252042876815797e+09,0,0,NULL,3,'{"what": "No schedule fits this memory budget.", "numbers": ["budget 100.0 KiB, least possible 907.7 KiB"], "hint": "give --gpu-budget 908KiB or, in the job file, gpu_budget: 908KiB", "code": "budget-too-small", "exit_code": 3}',NULL,'[]');
INSERT INTO "jobs" VALUES(3,'no-data','failed',NULL,0,'{state}/runs/3',NULL,1.7953325205469987392e+09,NULL,1.79533252246731877327e+09,0,0,NULL,2,'{"what": "resolved.yaml has one mistake.", "numbers": ["line 3: dataset: there is no dataset at {home}/gone.jsonl"], "hint": "correct the file and try again; docs/jobs.md lists every key", "code": "missing-file", "exit_code": 2}',NULL,'[]');
INSERT INTO "jobs" VALUES(4,'cancelled-running','cancelled','cancel',0,'{state}/runs/4',NULL,1.79533252256304478645e+09,1.79533253646430110929e+09,1.79533255238572239873e+09,1,0,8,-15,NULL,'{"event": "end", "time": 1795332551.7673824, "step": 8, "status": "stopped", "output": null, "step_s": 0.02265204849982183, "measured_steps": 6, "gpu_peak_bytes": 1456488, "predicted_step_s": 0.010114193520315774, "predicted_gpu_peak_bytes": 1457512}','[{"number": 1, "started_at": 1795332536.464301, "from_step": null, "ended_at": 1795332552.385284, "ending": "cancelled", "reached_step": 8, "checkpoint_step": 8}]');
INSERT INTO "jobs" VALUES(5,'cancelled-waiting','cancelled','cancel',0,'{state}/runs/5',NULL,1.79533255156705236436e+09,NULL,1.79533255163170433043e+09,0,0,NULL,NULL,NULL,NULL,'[]');
INSERT INTO "jobs" VALUES(6,'running','waiting','shutdown',0,'{state}/runs/6',NULL,1.79533255248861527446e+09,1.79533256577051520352e+09,NULL,2,0,4,75,NULL,NULL,'[{"number": 1, "started_at": 1795332565.7705152, "from_step": null, "ended_at": 1795332595.8450723, "ending": "went down with the daemon or the machine", "reached_step": 4, "checkpoint_step": 2}, {"number": 2, "started_at": 1795332597.6119099, "from_step": 2, "ended_at": 1795332615.7686203, "ending": "stopped with the daemon", "reached_step": 4, "checkpoint_step": 4}]');
INSERT INTO "jobs" VALUES(7,'waiting','waiting',NULL,0,'{state}/runs/7',NULL,1795332579.62702,NULL,NULL,0,0,NULL,0,NULL,NULL,'[]');
INSERT INTO "jobs" VALUES(8,'planning','submitted','shutdown',0,'{state}/runs/8',NULL,1.79533259135204839706e+09,NULL,NULL,0,0,NULL,-15,NULL,NULL,'[]');
INSERT INTO "jobs" VALUES(9,'submitted','submitted',NULL,0,'{state}/runs/9',NULL,1.79533259157098221778e+09,NULL,NULL,0,0,NULL,NULL,NULL,NULL,'[]');
CREATE TABLE measurements (
	id INTEGER NOT NULL,
	"key" VARCHAR(64) NOT NULL,
	device VARCHAR(255) NOT NULL,
	document JSON NOT NULL,
	hits INTEGER NOT NULL,
	created_at DATETIME NOT NULL,
	used_at DATETIME NOT NULL,
	PRIMARY KEY (id),
	UNIQUE ("key")
);
CREATE TABLE plans (
	id INTEGER NOT NULL,
	"key" VARCHAR(64) NOT NULL,
	model VARCHAR(1024) NOT NULL,
	document JSON NOT NULL,
	solve_s FLOAT NOT NULL,
	hits INTEGER NOT NULL,
	created_at DATETIME NOT NULL,
	used_at DATETIME NOT NULL,
	PRIMARY KEY (id),
	UNIQUE ("key")
);
CREATE INDEX ix_jobs_state ON jobs (state);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',9);
COMMIT;
