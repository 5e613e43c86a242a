BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0002');
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
INSERT INTO "jobs" VALUES(1,'done','done',NULL,0,'{state}/runs/1',NULL,1.79533199620699429515e+09,1.79533202023598265646e+09,1.79533205667591977123e+09,1,0,2,0,NULL,'{"event": "end", "time": 1795332053.0654244, "step": 3, "status": "done", "output": "{state}/runs/1/output", "step_s": 0.01801516300020012, "gpu_peak_bytes": 1456488, "predicted_step_s": 0.011784480336857237, "predicted_gpu_peak_bytes": 1457512}','[{"number": 1, "started_at": 1795332020.2359827, "from_step": null, "ended_at": 1795332056.6759107, "ending": "the trainer is done", "step": 2}]');
INSERT INTO "jobs" VALUES(2,'does-not-fit','failed',NULL,0,'{state}/runs/2',NULL,1.79533205683700227738e+09,NULL,1.79533207643994331356e+09,0,0,NULL,3,'{"what": "No schedule fits this memory budget.", "numbers": ["budget 100.0 KiB, least possible 968.4 KiB"], "hint": "give --gpu-budget 969KiB or, in the job file, gpu_budget: 969KiB", "code": "budget-too-small", "exit_code": 3}',NULL,'[]');
INSERT INTO "jobs" VALUES(3,'no-data','failed',NULL,0,'{state}/runs/3',NULL,1.79533207653101110458e+09,NULL,1795332078.05224,0,0,NULL,2,'{"what": "resolved.yaml has one mistake.", "numbers": ["line 3: dataset: there is no dataset at {home}/gone.jsonl"], "hint": "correct the file and try again; docs/jobs.md lists every key", "code": "missing-file", "exit_code": 2}',NULL,'[]');
INSERT INTO "jobs" VALUES(4,'cancelled-running','cancelled','cancel',0,'{state}/runs/4',NULL,1.79533207814691638947e+09,1.79533209643672394748e+09,1.79533211018634152413e+09,1,0,8,-15,NULL,'{"event": "end", "time": 1795332109.6073697, "step": 8, "status": "stopped", "output": null, "step_s": 0.0157720489996791, "gpu_peak_bytes": 1456488, "predicted_step_s": 0.011784480336857237, "predicted_gpu_peak_bytes": 1457512}','[{"number": 1, "started_at": 1795332096.436724, "from_step": null, "ended_at": 1795332110.1863332, "ending": "cancelled", "step": 8}]');
INSERT INTO "jobs" VALUES(5,'cancelled-waiting','cancelled','cancel',0,'{state}/runs/5',NULL,1.79533210940698623658e+09,NULL,1.79533210946463775634e+09,0,0,NULL,NULL,NULL,NULL,'[]');
INSERT INTO "jobs" VALUES(6,'running','running',NULL,0,'{state}/runs/6','6245:252320:{boot}',1.79533211029238843918e+09,1.79533212772019147877e+09,NULL,1,0,NULL,NULL,NULL,NULL,'[{"number": 1, "started_at": 1795332127.7201915, "from_step": null, "ended_at": null}]');
INSERT INTO "jobs" VALUES(7,'waiting','waiting',NULL,0,'{state}/runs/7',NULL,1.79533214087938070295e+09,NULL,NULL,0,0,NULL,0,NULL,NULL,'[]');
INSERT INTO "jobs" VALUES(8,'planning','planning',NULL,0,'{state}/runs/8','8107:255802:{boot}',1.79533216185849761959e+09,NULL,NULL,0,0,NULL,NULL,NULL,NULL,'[]');
INSERT INTO "jobs" VALUES(9,'submitted','submitted',NULL,0,'{state}/runs/9',NULL,1795332162.01211,NULL,NULL,0,0,NULL,NULL,NULL,NULL,'[]');
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
