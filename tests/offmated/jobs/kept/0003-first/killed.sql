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
INSERT INTO "jobs" VALUES(1,'done','done',NULL,0,'{state}/runs/1',NULL,1.79533220538374423983e+09,1.79533223303822135922e+09,1.79533228029420804982e+09,1,0,2,0,NULL,'{"event": "end", "time": 1795332276.3196027, "step": 3, "status": "done", "output": "{state}/runs/1/output", "step_s": 0.013484179999977641, "measured_steps": 1, "gpu_peak_bytes": 1456488, "predicted_step_s": 0.0034615627328697836, "predicted_gpu_peak_bytes": 1457512}','[{"number": 1, "started_at": 1795332233.0382214, "from_step": null, "ended_at": 1795332280.2942004, "ending": "the trainer is done", "step": 2}]');
INSERT INTO "jobs" VALUES(2,'does-not-fit','failed',NULL,0,'{state}/runs/2',NULL,1.7953322804069955349e+09,NULL,1.79533231374873566629e+09,0,0,NULL,3,'{"what": "No schedule fits this memory budget.", "numbers": ["budget 100.0 KiB, least possible 968.4 KiB"], "hint": "give --gpu-budget 969KiB or, in the job file, gpu_budget: 969KiB", "code": "budget-too-small", "exit_code": 3}',NULL,'[]');
INSERT INTO "jobs" VALUES(3,'no-data','failed',NULL,0,'{state}/runs/3',NULL,1.79533231388337278363e+09,NULL,1.79533231621767544743e+09,0,0,NULL,2,'{"what": "resolved.yaml has one mistake.", "numbers": ["line 3: dataset: there is no dataset at {home}/gone.jsonl"], "hint": "correct the file and try again; docs/jobs.md lists every key", "code": "missing-file", "exit_code": 2}',NULL,'[]');
INSERT INTO "jobs" VALUES(4,'cancelled-running','cancelled','cancel',0,'{state}/runs/4',NULL,1.79533231632704234122e+09,1.79533233755421471602e+09,1.79533235368856334689e+09,1,0,8,-15,NULL,'{"event": "end", "time": 1795332353.1197493, "step": 8, "status": "stopped", "output": null, "step_s": 0.015162645000145858, "measured_steps": 6, "gpu_peak_bytes": 1456488, "predicted_step_s": 0.0034615627328697836, "predicted_gpu_peak_bytes": 1457512}','[{"number": 1, "started_at": 1795332337.5542147, "from_step": null, "ended_at": 1795332353.6885562, "ending": "cancelled", "step": 8}]');
INSERT INTO "jobs" VALUES(5,'cancelled-waiting','cancelled','cancel',0,'{state}/runs/5',NULL,1.79533235296583533286e+09,NULL,1.79533235303915452958e+09,0,0,NULL,NULL,NULL,NULL,'[]');
INSERT INTO "jobs" VALUES(6,'running','running',NULL,0,'{state}/runs/6','15069:276687:{boot}',1.79533235379061865801e+09,1.79533237117601823804e+09,NULL,1,0,NULL,NULL,NULL,NULL,'[{"number": 1, "started_at": 1795332371.1760182, "from_step": null, "ended_at": null}]');
INSERT INTO "jobs" VALUES(7,'waiting','waiting',NULL,0,'{state}/runs/7',NULL,1.79533238365100336077e+09,NULL,NULL,0,0,NULL,0,NULL,NULL,'[]');
INSERT INTO "jobs" VALUES(8,'planning','planning',NULL,0,'{state}/runs/8','16019:279729:{boot}',1.79533240111505675313e+09,NULL,NULL,0,0,NULL,NULL,NULL,NULL,'[]');
INSERT INTO "jobs" VALUES(9,'submitted','submitted',NULL,0,'{state}/runs/9',NULL,1.79533240130717229848e+09,NULL,NULL,0,0,NULL,NULL,NULL,NULL,'[]');
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
