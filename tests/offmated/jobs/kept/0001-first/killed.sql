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
INSERT INTO "jobs" VALUES(1,'done','done',NULL,0,'{state}/runs/1',NULL,1.795331591359087944e+09,1.79533161492045688625e+09,1.79533165712812900548e+09,1,0,2,0,NULL,'{"event": "end", "time": 1795331654.194632, "step": 3, "status": "done", "output": "{state}/runs/1/output", "step_s": 0.011723616999915976, "gpu_peak_bytes": 1404520, "predicted_step_s": 0.0039971897117505855, "predicted_gpu_peak_bytes": 1405608}');
INSERT INTO "jobs" VALUES(2,'does-not-fit','failed',NULL,0,'{state}/runs/2',NULL,1.79533165723389029509e+09,NULL,1.79533167644957304003e+09,0,0,NULL,3,'{"what": "No schedule fits this memory budget.", "numbers": ["budget 100.0 KiB, least possible 970.5 KiB"], "hint": "give --gpu-budget 971KiB or, in the job file, gpu_budget: 971KiB", "code": "budget-too-small", "exit_code": 3}',NULL);
INSERT INTO "jobs" VALUES(3,'no-data','failed',NULL,0,'{state}/runs/3',NULL,1.79533167652542352673e+09,NULL,1.79533167883526134493e+09,0,0,NULL,2,'{"what": "resolved.yaml has one mistake.", "numbers": ["line 3: dataset: there is no dataset at {home}/gone.jsonl"], "hint": "correct the file and try again; docs/jobs.md lists every key", "code": "missing-file", "exit_code": 2}',NULL);
INSERT INTO "jobs" VALUES(4,'cancelled-running','cancelled','cancel',0,'{state}/runs/4',NULL,1.79533167895513248442e+09,1.79533169650827121731e+09,1.79533171346362733838e+09,1,0,8,-15,NULL,'{"event": "end", "time": 1795331712.8754785, "step": 8, "status": "stopped", "output": null, "step_s": 0.023048586999948384, "gpu_peak_bytes": 1404520, "predicted_step_s": 0.0039971897117505855, "predicted_gpu_peak_bytes": 1405608}');
INSERT INTO "jobs" VALUES(5,'cancelled-waiting','cancelled','cancel',0,'{state}/runs/5',NULL,1.79533171264147424703e+09,NULL,1.79533171271608734138e+09,0,0,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(6,'running','running',NULL,0,'{state}/runs/6','27106:212961:{boot}',1.79533171353298187256e+09,1.7953317336484904289e+09,NULL,1,0,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(7,'waiting','waiting',NULL,0,'{state}/runs/7',NULL,1.79533174992735505099e+09,NULL,NULL,0,0,NULL,0,NULL,NULL);
INSERT INTO "jobs" VALUES(8,'planning','planning',NULL,0,'{state}/runs/8','27960:216789:{boot}',1.79533177171010756498e+09,NULL,NULL,0,0,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(9,'submitted','submitted',NULL,0,'{state}/runs/9',NULL,1.79533177194699239734e+09,NULL,NULL,0,0,NULL,NULL,NULL,NULL);
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
