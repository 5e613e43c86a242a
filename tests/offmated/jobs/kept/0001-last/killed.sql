BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
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
);
INSERT INTO "jobs" VALUES(1,'done','done',NULL,0,'{state}/runs/1',NULL,1.79533181037906146041e+09,1.79533182968658852575e+09,1.79533186259905481333e+09,1,0,2,0,NULL,'{"event": "end", "time": 1795331859.4514568, "step": 3, "status": "done", "output": "{state}/runs/1/output", "step_s": 0.010584908000055293, "gpu_peak_bytes": 1456488, "predicted_step_s": 0.0018839525630807204, "predicted_gpu_peak_bytes": 1457512}');
INSERT INTO "jobs" VALUES(2,'does-not-fit','failed',NULL,0,'{state}/runs/2',NULL,1.79533186267092776302e+09,NULL,1.79533187782230257987e+09,0,0,NULL,3,'{"what": "No schedule fits this memory budget.", "numbers": ["budget 100.0 KiB, least possible 970.4 KiB"], "hint": "give --gpu-budget 971KiB or, in the job file, gpu_budget: 971KiB", "code": "budget-too-small", "exit_code": 3}',NULL);
INSERT INTO "jobs" VALUES(3,'no-data','failed',NULL,0,'{state}/runs/3',NULL,1.79533187792521834371e+09,NULL,1.7953318801526768208e+09,0,0,NULL,2,'{"what": "resolved.yaml has one mistake.", "numbers": ["line 3: dataset: there is no dataset at {home}/gone.jsonl"], "hint": "correct the file and try again; docs/jobs.md lists every key", "code": "missing-file", "exit_code": 2}',NULL);
INSERT INTO "jobs" VALUES(4,'cancelled-running','cancelled','cancel',0,'{state}/runs/4',NULL,1.7953318802349376678e+09,1.79533190210036659242e+09,1.79533191991848182673e+09,1,0,9,-15,NULL,'{"event": "end", "time": 1795331919.3713524, "step": 9, "status": "stopped", "output": null, "step_s": 0.01971535600023344, "gpu_peak_bytes": 1456488, "predicted_step_s": 0.0018839525630807204, "predicted_gpu_peak_bytes": 1457512}');
INSERT INTO "jobs" VALUES(5,'cancelled-waiting','cancelled','cancel',0,'{state}/runs/5',NULL,1.79533191912789154049e+09,NULL,1.79533191919391751294e+09,0,0,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(6,'running','running',NULL,0,'{state}/runs/6','558:232998:{boot}',1.79533192002307868005e+09,1.79533193422529530527e+09,NULL,1,0,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(7,'waiting','waiting',NULL,0,'{state}/runs/7',NULL,1.79533194572299909593e+09,NULL,NULL,0,0,NULL,0,NULL,NULL);
INSERT INTO "jobs" VALUES(8,'planning','planning',NULL,0,'{state}/runs/8','1379:235832:{boot}',1.79533196215716576581e+09,NULL,NULL,0,0,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(9,'submitted','submitted',NULL,0,'{state}/runs/9',NULL,1.79533196236301803593e+09,NULL,NULL,0,0,NULL,NULL,NULL,NULL);
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
